// Tiles cut every byte of every segment exactly once, and groups cut the tiles.
#include <vector>

#include "core/schedule/tiles.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

void check_cut(const std::vector<int64_t>& segment_bytes, int64_t tile_bytes) {
  const Tiles tiles(segment_bytes, tile_bytes);
  const uec::TileMap& map = tiles.map();
  int64_t tile = 0, total = 0;
  for (size_t i = 0; i < segment_bytes.size(); ++i) {
    total += segment_bytes[i];
    for (int64_t offset = 0; offset < segment_bytes[i]; ++tile) {
      const uec::TileSpan span = map.span(tile);
      CHECK_EQ(span.segment, i);
      CHECK_EQ(span.offset, offset);
      CHECK(span.bytes > 0 && span.bytes <= tile_bytes);
      offset += span.bytes;
      CHECK(offset <= segment_bytes[i]);
      CHECK(span.bytes == tile_bytes || offset == segment_bytes[i]);  // only the last one is short
    }
  }
  CHECK_EQ(map.num_tiles(), tile);
  CHECK_EQ(map.expert_bytes(), total);
  const int64_t per_group = uec::TileMap::tiles_per_group(tile_bytes);
  CHECK_EQ(map.group_tiles, per_group);
  CHECK(per_group == 1 || per_group * tile_bytes <= uec::kGroupBytes);
  CHECK((per_group + 1) * tile_bytes > uec::kGroupBytes);  // as coarse as allowed
  CHECK(map.num_groups() * per_group >= tile);
  CHECK((map.num_groups() - 1) * per_group < tile || tile == 0);
}

void check_selection() {
  // A call may take some of the group's segments: spans name the group's index.
  const int32_t segment[] = {1, 3};
  const int64_t bytes[] = {100, 50}, first_tile[] = {0, 2, 3};
  const uec::TileMap map{2, segment, bytes, first_tile, 64};
  CHECK_EQ(map.span(1).segment, 1);
  CHECK_EQ(map.span(1).offset, 64);
  CHECK_EQ(map.span(1).bytes, 36);
  CHECK_EQ(map.span(2).segment, 3);
  CHECK_EQ(map.span(2).bytes, 50);
}

}  // namespace

int main() {
  for (const int64_t tile_bytes : {1 << 10, 4 << 10, 32 << 10, 64 << 10, 96 << 10, 1 << 20}) {
    check_cut({1}, tile_bytes);
    check_cut({3, 1, 2}, tile_bytes);
    check_cut({tile_bytes - 1, tile_bytes, tile_bytes + 1}, tile_bytes);
    check_cut({0, 7, 0}, tile_bytes);
    check_cut({}, tile_bytes);
    check_cut({5 * tile_bytes, 3 * tile_bytes + 17, 1}, tile_bytes);
  }
  check_selection();
}
