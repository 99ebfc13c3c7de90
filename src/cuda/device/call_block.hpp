// A call's block in device memory: a header, and behind it the arrays that a rank's workers read,
// one after another. Every block of the rank copies them into shared memory as they are: an acquire
// at system scope empties the first-level cache, so that without a copy each of a chain of look-ups
// would go to the second-level cache again.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "core/base/team.hpp"
#include "core/transfer/call_arrays.hpp"
#include "cuda/tables.hpp"

namespace uec::cuda {

struct alignas(16) CallHeader {
  uint64_t digest = 0;    // what this call adds to the chain
  int32_t bytes = 0;      // of the arrays that are only read
  uint32_t pointers = 0;  // bit i: word i of the body is a pointer: its offset in the block
  CallBody body;          // the counters lie behind all arrays
};

inline constexpr int64_t kHeaderBytes = sizeof(CallHeader);
inline constexpr int32_t kBodyWords = sizeof(CallBody) / sizeof(uint64_t);
inline constexpr int32_t kHeaderWords = offsetof(CallHeader, body) / sizeof(uint64_t) + kBodyWords;
static_assert(kBodyWords <= 32);

namespace detail {

// Calls f(begin, end, arrays...) for each run of memory that holds arrays of a call. `tables_end`:
// of the rank's tables that a call points to.
template <class F>
UEC_HD void for_each_run(CallBody& call, const Capacity& c, const void* tables_end, F&& f) {
  Addresses& a = call.addresses;
  Gradients& g = call.grads;
  TileMap& t = call.tiles;
  Worklist& w = call.work;
  f(a.bases, tables_end, a.bases, a.segment_bytes, a.slot_offset, a.region_offset, g.bytes,
    g.offset, g.type, a.far);
  f(a.regions, a.regions == nullptr ? nullptr : a.regions + c.num_ranks, a.regions);
  f(t.bytes, call.main_type + c.num_grad_segments, t.bytes, t.first_tile, a.mains, t.segment,
    call.main_type);
  const void* const ends[] = {w.pieces + w.num_pieces, w.reductions + w.num_reductions};
  f(w.tasks, ends[w.num_reductions > 0], w.tasks, w.pieces, w.reductions);
  f(w.destinations, w.destinations + w.num_destinations, w.destinations);
  f(w.expected, w.expected + w.num_expected, w.expected);
  f(w.opens, w.needs + c.num_ranks, w.opens, w.involved, w.needs);
}

UEC_HD inline int32_t padded_bytes(const void* begin, const void* end) {
  return static_cast<int32_t>(
      round_up(static_cast<const std::byte*>(end) - static_cast<const std::byte*>(begin), 8));
}

}  // namespace detail

// The most that a call's block can take.
UEC_HD inline int64_t call_block_bytes(const Capacity& c) {
  constexpr int64_t kPadding = 8 * 8;  // of a few runs
  CallArrays arrays;
  Tables tables;
  return round_up(kHeaderBytes + CallArrays::cut(nullptr, c, &arrays) +
                      Tables::cut(nullptr, c, &tables) +
                      c.num_ranks * static_cast<int64_t>(sizeof(uint64_t)) + kPadding,
                  128);
}

// By a team: writes the arrays of a call's block. The call stays as it is.
template <class Team>
UEC_HD void pack_arrays(Team team, CallBody& call, const Capacity& c, const void* tables_end,
                        std::byte* block) {
  auto* to = reinterpret_cast<uint64_t*>(block + kHeaderBytes);
  detail::for_each_run(call, c, tables_end, [&](const void* begin, const void* end, auto&...) {
    const int32_t words = detail::padded_bytes(begin, end) / 8;
    const auto* const from = static_cast<const uint64_t*>(begin);
    for (int32_t i = team.index(); i < words; i += team.size()) to[i] = from[i];
    to += words;
  });
  auto* const arrived = reinterpret_cast<int32_t*>(to);
  const int32_t counters = max32(call.work.num_tasks, call.work.num_reductions);
  for (int32_t i = team.index(); i < counters; i += team.size()) arrived[i] = 0;
}

// By one thread: its header.
UEC_HD inline void pack_header(CallBody& call, const Capacity& c, const void* tables_end,
                               uint64_t digest, std::byte* block) {
  auto& header = *reinterpret_cast<CallHeader*>(block);
  header.body = call;
  uint32_t pointers = 0;
  auto at = static_cast<int32_t>(kHeaderBytes);
  const auto put = [&](auto*& array, int64_t offset) {
    const int64_t where =
        reinterpret_cast<std::byte*>(&array) - reinterpret_cast<std::byte*>(&call);
    using Array = std::remove_reference_t<decltype(array)>;
    auto& to = *reinterpret_cast<Array*>(reinterpret_cast<std::byte*>(&header.body) + where);
    to = array == nullptr ? nullptr : reinterpret_cast<Array>(offset);
    pointers |= array == nullptr ? 0u : 1u << where / 8;
  };
  detail::for_each_run(
      call, c, tables_end, [&](const void* begin, const void* end, auto&... arrays) {
        (put(arrays, at + (reinterpret_cast<intptr_t>(arrays) - reinterpret_cast<intptr_t>(begin))),
         ...);
        at += detail::padded_bytes(begin, end);
      });
  header.body.arrived = reinterpret_cast<int32_t*>(intptr_t{at});
  header.digest = digest;
  header.bytes = at - static_cast<int32_t>(kHeaderBytes);
  header.pointers = pointers;
}

// The reverse, by a team: `from` is where the block, or a copy of what is only read, lies.
template <class Team>
UEC_HD void place_arrays(Team team, CallBody& call, uint32_t pointers, const std::byte* from,
                         std::byte* block) {
  constexpr int32_t kArrived = offsetof(CallBody, arrived) / sizeof(uint64_t);
  for (int32_t i = team.index(); i < kBodyWords; i += team.size()) {
    void* const at =
        __builtin_assume_aligned(reinterpret_cast<std::byte*>(&call) + i * sizeof(uint64_t), 8);
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    if (i == kArrived) word += reinterpret_cast<uint64_t>(block);
    if ((pointers >> i & 1) != 0) word += reinterpret_cast<uint64_t>(from);
    std::memcpy(at, &word, sizeof(word));
  }
}

}  // namespace uec::cuda
