// A call's block in device memory: a header, and behind it the arrays that a rank's workers read,
// one after another. Every block of the rank copies them into shared memory as they are: an acquire
// at system scope empties the first-level cache, so that without a copy each of a chain of look-ups
// would go to the second-level cache again.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/base/team.hpp"
#include "core/transfer/call_arrays.hpp"
#include "cuda/device/tables.hpp"

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
inline constexpr int32_t kArrived = offsetof(CallBody, arrived) / sizeof(uint64_t);
static_assert(kBodyWords <= 32);

// Lets a call pull from a region: [G] addresses, then [segments] offsets; null: it does not.
UEC_HD inline void take_region(Addresses& addresses, const uint64_t* region, int32_t num_ranks) {
  addresses.regions = reinterpret_cast<const uint8_t* const*>(region);
  addresses.region_offset =
      region == nullptr ? nullptr : reinterpret_cast<const int64_t*>(region + num_ranks);
}

namespace detail {

template <class... Offset>
constexpr uint32_t body_words(Offset... offsets) {
  return ((1u << offsets / sizeof(uint64_t)) | ...);
}

// Calls f(begin, end, words) for each run of memory that holds arrays of a call. Bit i of `words`:
// word i of the body points there, or is null. `tables_end`: of the rank's tables that a call
// points to.
template <class F>
UEC_HD void for_each_run(const CallBody& call, const Capacity& c, const void* tables_end, F&& f) {
  const Worklist& w = call.work;
#define UEC_AT(field) offsetof(CallBody, field)
  f(call.addresses.bases, tables_end,
    body_words(UEC_AT(addresses.bases), UEC_AT(addresses.segment_bytes), UEC_AT(addresses.far),
               UEC_AT(grads.bytes), UEC_AT(grads.type)));
  const int64_t* const offsets = call.addresses.slot_offset;
  f(offsets, offsets + BankTables::row_size(c),
    body_words(UEC_AT(addresses.slot_offset), UEC_AT(grads.offset)));
  const auto* const regions = call.addresses.regions;
  f(regions, regions == nullptr ? nullptr : regions + c.num_ranks + c.num_segments,
    body_words(UEC_AT(addresses.regions), UEC_AT(addresses.region_offset)));
  f(call.tiles.bytes, call.main_type + c.num_grad_segments,
    body_words(UEC_AT(tiles.bytes), UEC_AT(tiles.first_tile), UEC_AT(tiles.segment),
               UEC_AT(addresses.main_ptrs), UEC_AT(main_type)));
  const void* const pieces_end = w.pieces + w.num_pieces;
  const void* const reductions_end = w.reductions + w.num_reductions;
  f(w.tasks, w.num_reductions > 0 ? reductions_end : pieces_end,
    body_words(UEC_AT(work.tasks), UEC_AT(work.pieces), UEC_AT(work.reductions)));
  f(w.destinations, w.destinations + w.num_destinations, body_words(UEC_AT(work.destinations)));
  f(w.expected, w.expected + w.num_expected, body_words(UEC_AT(work.expected)));
  f(w.opens, w.needs + c.num_ranks,
    body_words(UEC_AT(work.opens), UEC_AT(work.involved), UEC_AT(work.needs)));
#undef UEC_AT
}

UEC_HD inline uint64_t load_word(const CallBody& call, int32_t i) {
  const auto* const at = reinterpret_cast<const std::byte*>(&call) + i * sizeof(uint64_t);
  uint64_t word;
  std::memcpy(&word, __builtin_assume_aligned(at, 8), sizeof(word));
  return word;
}
UEC_HD inline void store_word(CallBody& call, int32_t i, uint64_t word) {
  auto* const at = reinterpret_cast<std::byte*>(&call) + i * sizeof(uint64_t);
  std::memcpy(__builtin_assume_aligned(at, 8), &word, sizeof(word));
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
                      (BankTables::row_size(c) + c.num_ranks + c.num_segments) *
                          static_cast<int64_t>(sizeof(uint64_t)) +
                      kPadding,
                  128);
}

// By a team: writes the arrays of a call's block.
template <class Team>
UEC_HD void pack_arrays(Team team, const CallBody& call, const Capacity& c, const void* tables_end,
                        std::byte* block) {
  int64_t at = kHeaderBytes;
  detail::for_each_run(call, c, tables_end, [&](const void* begin, const void* end, uint32_t) {
    const int32_t words = detail::padded_bytes(begin, end) / 8;
    const auto* const from = static_cast<const uint64_t*>(begin);
    auto* const to = reinterpret_cast<uint64_t*>(block + at);
    for (int32_t i = team.index(); i < words; i += team.size()) to[i] = from[i];
    at += words * static_cast<int64_t>(sizeof(uint64_t));
  });
  auto* const arrived = reinterpret_cast<int32_t*>(block + round_up(at, 16));
  const int32_t counters = max32(call.work.num_tasks, call.work.num_reductions);
  for (int32_t i = team.index(); i < counters; i += team.size()) arrived[i] = 0;
}

// By a team: its header.
template <class Team>
UEC_HD void pack_header(Team team, const CallBody& call, const Capacity& c, const void* tables_end,
                        uint64_t digest, std::byte* block) {
  auto& header = *reinterpret_cast<CallHeader*>(block);
  uint32_t pointers = 0;
  int64_t at = 0;
  for (int32_t i = team.index(); i < kBodyWords; i += team.size()) {
    uint64_t word = detail::load_word(call, i);
    at = kHeaderBytes;
    const auto move = [&](const void* begin, const void* end, uint32_t words) {
      const bool points = (words >> i & 1) != 0 && word != 0;
      if (points) word += static_cast<uint64_t>(at) - reinterpret_cast<uint64_t>(begin);
      pointers |= points ? 1u << i : 0;
      at += detail::padded_bytes(begin, end);
    };
    detail::for_each_run(call, c, tables_end, move);
    at = round_up(at, 16);  // is copied in quads, and without the counters
    detail::store_word(header.body, i, i == kArrived ? static_cast<uint64_t>(at) : word);
  }
  pointers = team.sum(pointers);
  if (!team.leader()) return;
  header.digest = digest;
  header.bytes = static_cast<int32_t>(at - kHeaderBytes);
  header.pointers = pointers;
}

// The reverse, by a team: `from` is where the block, or a copy of what is only read, lies.
template <class Team>
UEC_HD void place_arrays(Team team, CallBody& call, uint32_t pointers, const std::byte* from,
                         std::byte* block) {
  for (int32_t i = team.index(); i < kBodyWords; i += team.size()) {
    uint64_t word = detail::load_word(call, i);
    if (i == kArrived) word += reinterpret_cast<uint64_t>(block);
    if ((pointers >> i & 1) != 0) word += reinterpret_cast<uint64_t>(from);
    detail::store_word(call, i, word);
  }
}

}  // namespace uec::cuda
