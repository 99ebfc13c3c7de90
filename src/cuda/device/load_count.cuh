// Ids -> counts, by all blocks of a rank, which may be given counts.
//
// 65536 ids of 8 bytes are 512 KiB: 19 blocks have them in flight at once. Sums of integers are the
// same in any order, so blocks need no order.
#pragma once

#include "cuda/device/config.hpp"
#include "cuda/device/load_block.hpp"
#include "cuda/device/ptx.cuh"

namespace uec::cuda {

// The sums over the blocks of a rank, in device memory.
struct LoadSums {
  int32_t* counts;   // [E]
  uint64_t* bad_id;  // bad_id_word()
  int32_t num_experts;
};

template <class Id>
UEC_DEVICE void count_id(const LoadSums& sums, int32_t* counts, Id id, int64_t position) {
  if (static_cast<uint64_t>(id) < static_cast<uint64_t>(sums.num_experts))
    ptx::add_shared_relaxed(&counts[id], 1);
  else if (id != Id{-1})
    ptx::max_relaxed(sums.bad_id, bad_id_word(static_cast<uint64_t>(position)));
}

template <class Id>
UEC_DEVICE void count_quad(const LoadSums& sums, int32_t* counts, const uint4& quad,
                           int64_t position) {
  const uint32_t words[] = {quad.x, quad.y, quad.z, quad.w};
  constexpr int32_t kWords = sizeof(Id) / sizeof(uint32_t);
#pragma unroll
  for (int32_t i = 0; i < 4 / kWords; ++i) {
    uint64_t id = words[i * kWords];
    if constexpr (kWords == 2) id |= static_cast<uint64_t>(words[i * kWords + 1]) << 32;
    count_id(sums, counts, static_cast<Id>(id), position + i);
  }
}

// This block's share, into counts [E] of its own, by its first num_counting threads.
template <class Id>
UEC_DEVICE void count_share(const LoadCall& call, const LoadSums& sums, int32_t* counts,
                            int32_t num_counting) {
  const auto* const ids = reinterpret_cast<const Id*>(call.ids);
  constexpr int32_t kPerQuad = 16 / static_cast<int32_t>(sizeof(Id));
  const int64_t before = min64(call.count, static_cast<int64_t>(-call.ids % 16 / sizeof(Id)));
  const int64_t num_quads = (call.count - before) / kPerQuad;
  const auto* const quads = reinterpret_cast<const uint4*>(ids + before);
  const int64_t first = int64_t{ptx::block_x()} * num_counting + ptx::thread_idx();
  const int64_t step = int64_t{ptx::num_blocks_x()} * num_counting;
#pragma unroll 1
  for (int64_t q = first; q < num_quads; q += kQuadsAtOnce * step) {
    uint4 quad[kQuadsAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kQuadsAtOnce; ++i)
      quad[i] = q + i * step < num_quads ? ptx::load_global(quads + q + i * step) : uint4{};
#pragma unroll
    for (int32_t i = 0; i < kQuadsAtOnce; ++i)
      if (q + i * step < num_quads)
        count_quad<Id>(sums, counts, quad[i], before + (q + i * step) * kPerQuad);
  }
  // Ids before the first aligned 16 bytes, and after the last.
#pragma unroll 1
  for (int64_t i = first; i < call.count - num_quads * kPerQuad; i += step) {
    const int64_t position = i < before ? i : i + num_quads * kPerQuad;
    count_id(sums, counts, ids[position], position);
  }
}

// This block's share of given counts, of which each has one reader.
UEC_DEVICE void take_share(const LoadCall& call, const LoadSums& sums, int32_t* counts,
                           int32_t num_counting) {
  const auto* const given = reinterpret_cast<const uint32_t*>(call.ids);
  const int32_t first = ptx::block_x() * num_counting + ptx::thread_idx();
  for (int32_t e = first; e < sums.num_experts; e += ptx::num_blocks_x() * num_counting) {
    const auto tokens = static_cast<int32_t>(ptx::load_global(given + e));
    if (tokens < 0) ptx::max_relaxed(sums.bad_id, bad_id_word(static_cast<uint64_t>(e)));
    counts[e] = tokens;
  }
}

// Adds this block's share to the sums, by way of counts [E] in shared memory. The other warps do
// something else meanwhile, or all do that too.
template <class Else>
UEC_DEVICE void count_ids(const LoadCall& call, const LoadSums& sums, int32_t* counts,
                          Else&& overlapped) {
  const int32_t num_counting = LoadGrid::num_counting(ptx::num_threads(), ptx::kWarpSize);
  for (int32_t e = ptx::thread_idx(); e < sums.num_experts; e += ptx::num_threads()) counts[e] = 0;
  ptx::sync_block();
  if (ptx::thread_idx() < num_counting) {
    if (call.id_bytes == 0)
      take_share(call, sums, counts, num_counting);
    else if (call.id_bytes == 4)
      count_share<int32_t>(call, sums, counts, num_counting);
    else
      count_share<int64_t>(call, sums, counts, num_counting);
  }
  overlapped();
  ptx::sync_block();
  for (int32_t e = ptx::thread_idx(); e < sums.num_experts; e += ptx::num_threads())
    if (counts[e] != 0) ptx::add_relaxed(&sums.counts[e], counts[e]);
}

}  // namespace uec::cuda
