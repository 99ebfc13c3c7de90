// How an expert's bytes are cut: segments -> tiles -> flag groups.
//
// A tile never straddles two segments (they live at different addresses). A flag group is a run of
// consecutive tiles that shares one ready flag; hub ranges begin and end on group boundaries.
#pragma once

#include "core/base/bounds.hpp"
#include "core/base/common.hpp"

namespace uec {

struct TileSpan {
  int32_t segment;  // index into the group's segments, not into the call's selection
  int64_t offset;   // bytes from the start of the segment
  int32_t bytes;
};

// The tiles of the segments that one call transfers. Arrays are borrowed.
struct TileMap {
  int32_t num_segments = 0;
  const int32_t* segment = nullptr;     // [num_segments] which of the group's segments
  const int64_t* bytes = nullptr;       // [num_segments] bytes of one expert in it
  const int64_t* first_tile = nullptr;  // [num_segments + 1]
  int64_t tile_bytes = 0;
  int32_t group_tiles = 0;  // tiles_per_group()

  UEC_HD int64_t num_tiles() const { return first_tile[num_segments]; }

  UEC_HD int64_t expert_bytes() const {
    int64_t sum = 0;
    for (int32_t i = 0; i < num_segments; ++i) sum += bytes[i];
    return sum;
  }

  UEC_HD static int32_t tiles_per_group(int64_t tile_bytes) {
    return max32(1, static_cast<int32_t>(divide(kGroupBytes, tile_bytes)));
  }

  UEC_HD int32_t num_groups() const {
    return static_cast<int32_t>(divide(num_tiles() + group_tiles - 1, group_tiles));
  }

  UEC_HD TileSpan span(int64_t tile) const { return span(tile, tile + 1); }
  // Spans the tiles up to `end` that are of the same segment.
  UEC_HD TileSpan span(int64_t tile, int64_t end) const {
    int32_t i = 0;
    while (tile >= first_tile[i + 1]) ++i;  // few segments, and the first is usually the largest
    const int64_t offset = (tile - first_tile[i]) * tile_bytes;
    return {segment[i], offset,
            static_cast<int32_t>(min64((end - tile) * tile_bytes, bytes[i] - offset))};
  }
};

}  // namespace uec
