// The types of gradients, and what a reduction needs to know of a group's.
//
// A reduction adds to the main gradient the sum of its replicas' gradients, in ascending rank order
// and in fp32, and rounds once, to the main gradient's type: main + (r1 + r2 + ... + rn), whichever
// ranks do the adding.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/schedule/tiles.hpp"

namespace uec {

enum class GradType : int32_t { kFloat32 = 0, kBFloat16 = 1 };

UEC_HD constexpr int64_t bytes_of(GradType type) { return type == GradType::kFloat32 ? 4 : 2; }

UEC_HD constexpr int64_t elements_of(int64_t bytes, GradType type) {
  return type == GradType::kFloat32 ? bytes / 4 : bytes / 2;
}

UEC_HD inline float from_bfloat16(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even; every NaN becomes the one that torch makes of it. Integer
// arithmetic, so that all engines round alike.
UEC_HD inline uint16_t to_bfloat16(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Slot gradients of a group; arrays are borrowed. Main gradients belong to a call.
struct Gradients {
  int32_t num_segments = 0;         // 0: slots hold no gradients
  const int64_t* bytes = nullptr;   // [num_segments] of one expert in a slot
  const GradType* type = nullptr;   // [num_segments] in a slot
  const int64_t* offset = nullptr;  // [num_segments] of the bank's slot 0 in symmetric memory
};

// Upper bound of the flag groups of one expert's gradients.
UEC_HD inline int64_t max_grad_groups(int64_t num_tiles, int64_t tile_bytes) {
  return ceil_div(num_tiles, TileMap::tiles_per_group(tile_bytes));
}

// Bytes of one slot's fp32 sums where these cannot be made in place: enough for a hub's largest
// range, which is half of the groups, because a single replica needs no summing.
UEC_HD inline int64_t sums_bytes(int64_t num_tiles, int64_t tile_bytes) {
  const int64_t group_tiles = TileMap::tiles_per_group(tile_bytes);
  const int64_t range = ceil_div(ceil_div(num_tiles, group_tiles), 2) * group_tiles;
  return min64(range, num_tiles) * tile_bytes *
         (bytes_of(GradType::kFloat32) / bytes_of(GradType::kBFloat16));
}

}  // namespace uec
