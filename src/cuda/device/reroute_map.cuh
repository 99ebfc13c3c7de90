// The reroute of a routing map and its probabilities: one launch, one pass over the map.
//
// A token of an expert is a one in the expert's column, so that a lane counts whole columns of its
// warp's rows. 8192 tokens of 256 experts, 384 physical ones, with 4-byte probabilities: 2 MiB of
// map in, 3 MiB of map and 12 MiB of probabilities out, mostly zeros: 5 us. These are stored while
// the other blocks' counts are in flight.
#pragma once

#include "cuda/device/reroute_runs.cuh"

namespace uec::cuda {

static_assert(kTokensPerWarp <= 8, "RerouteShared::bits has a bit for each");

// Sets fewer than 2^31 bytes to one value.
UEC_DEVICE void fill(uint8_t* at, int32_t bytes, uint8_t value) {
  const uint32_t word = value * 0x01010101u;
  const auto head = static_cast<int32_t>(-reinterpret_cast<uint64_t>(at) % 16);
  const int32_t begin = head < bytes ? head : bytes, num_quads = (bytes - begin) / 16;
  const int32_t end = begin + 16 * num_quads;
  auto* const quads = reinterpret_cast<uint4*>(at + begin);
  by_threads(begin, [&](int32_t i) { at[i] = value; });
  by_threads(num_quads, [&](int32_t i) { quads[i] = uint4{word, word, word, word}; });
  by_threads(bytes - end, [&](int32_t i) { at[end + i] = value; });
}

template <class Element>
UEC_DEVICE void copy_element(uint64_t to, int64_t to_at, uint64_t from, int64_t from_at) {
  reinterpret_cast<Element*>(to)[to_at] = reinterpret_cast<const Element*>(from)[from_at];
}

UEC_DEVICE void move_token(const RerouteArgs& args, int64_t to, int64_t from) {
  reinterpret_cast<uint8_t*>(args.to)[to] = 1;
  if (args.probs == 0) return;
  switch (args.prob_bytes) {
    case 1:
      return copy_element<uint8_t>(args.physical_probs, to, args.probs, from);
    case 2:
      return copy_element<uint16_t>(args.physical_probs, to, args.probs, from);
    case 4:
      return copy_element<uint32_t>(args.physical_probs, to, args.probs, from);
    default:
      return copy_element<uint64_t>(args.physical_probs, to, args.probs, from);
  }
}

UEC_DEVICE void count_map(const RerouteArgs& args, const RerouteBlock& block, int64_t first) {
  const auto* const map = reinterpret_cast<const uint8_t*>(args.from);
  const int32_t num_experts = block.shape.num_experts;
  uint8_t* const bits_of = block.shared.bits + warp_idx() * num_experts;
  uint16_t* const counts = block.shared.counts + warp_idx() * num_experts;
  const int64_t left = args.count - first;
  const uint8_t* const rows = map + first * num_experts;
#pragma unroll 1
  for (int32_t e = Warp::index(); e < num_experts; e += kColumnsAtOnce * ptx::kWarpSize) {
    uint8_t ones[kColumnsAtOnce][kTokensPerWarp];
#pragma unroll
    for (int32_t i = 0; i < kColumnsAtOnce; ++i)
#pragma unroll
      for (int32_t t = 0; t < kTokensPerWarp; ++t) {
        const int32_t column = e + i * ptx::kWarpSize;
        ones[i][t] = t < left && column < num_experts ? rows[t * num_experts + column] : 0;
      }
#pragma unroll
    for (int32_t i = 0; i < kColumnsAtOnce; ++i) {
      const int32_t column = e + i * ptx::kWarpSize;
      if (column >= num_experts) break;
      uint32_t bits = 0;
#pragma unroll
      for (int32_t t = 0; t < kTokensPerWarp; ++t) bits |= (ones[i][t] != 0 ? 1u : 0u) << t;
      bits_of[column] = static_cast<uint8_t>(bits);
      counts[column] = static_cast<uint16_t>(ptx::num_set(bits));
    }
  }
}

// The rows of all the block's tokens.
UEC_DEVICE void clear_rows(const RerouteArgs& args, int64_t first, int64_t width) {
  const int64_t count = min64(int64_t{kTokensPerWarp} * num_warps(), args.count - first);
  if (count <= 0) return;
  const auto bytes = static_cast<int32_t>(count * width);
  fill(reinterpret_cast<uint8_t*>(args.to) + first * width, bytes, 0);
  if (args.probs != 0)
    fill(reinterpret_cast<uint8_t*>(args.physical_probs) + first * width * args.prob_bytes,
         bytes * args.prob_bytes, 0);
  if (args.instances != 0)  // with -1
    fill(reinterpret_cast<uint8_t*>(args.instances + first * args.shape.num_experts),
         static_cast<int32_t>(count * args.shape.num_experts * sizeof(int32_t)), 0xFF);
}

UEC_DEVICE void reroute_map(const RerouteArgs& args, std::byte* shared_memory) {
  RerouteBlock block;
  const bool is_good = enter(args, shared_memory, block);
  const int64_t width = int64_t{block.shape.num_ranks} * block.shape.per_rank;
  const int64_t first_of_block = int64_t{block.run} * num_warps() * kTokensPerWarp;
  const int32_t num_experts = block.shape.num_experts;
  const int64_t first = first_of_block + warp_idx() * kTokensPerWarp;
  if (!is_good) {
    clear_rows(args, first_of_block, width);
  } else {
    count_map(args, block, first);
    publish_counts(block);
    clear_rows(args, first_of_block, width);
    sum_runs(block);
    if (block.is_last_run()) check_totals(block);
  }
  leave(args, block,
        [](int64_t) { return int64_t{-1}; });  // its barrier also keeps zeros before ones
  if (!is_good) return;
  for (int32_t e = Warp::index(); e < num_experts; e += ptx::kWarpSize) {
    uint32_t bits = block.shared.bits[warp_idx() * num_experts + e];
    for (int32_t ordinal = 0; bits != 0; ++ordinal, bits &= bits - 1) {
      const int64_t token = first + ptx::lowest_set(bits);
      const int32_t instance = instance_of(block, e, ordinal);
      if (instance < 0) continue;
      move_token(args, token * width + instance, token * num_experts + e);
      if (args.instances != 0) args.instances[token * num_experts + e] = instance;
    }
  }
}

}  // namespace uec::cuda
