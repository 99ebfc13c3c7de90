// No two things in a rank's symmetric memory overlap, and each lies as its header promises.
#include <algorithm>
#include <set>
#include <vector>

#include "core/transfer/layout.hpp"
#include "support/check.hpp"

namespace {

struct Range {
  int64_t begin, end;
};

struct SlotGradients {
  std::vector<int64_t> bytes{};
  std::vector<uec::GradType> type{};
  int64_t tile_bytes = 32 << 10;
};

struct Sets {
  int32_t num_banks = 1, num_grad_banks = 1;
  int64_t instance_align = 0;
};

// What a segment's slots take in each of the `sets`: with the room for local experts before them,
// in pages of their own, or dense, behind those of the set before.
void add_slots(const std::vector<int64_t>& offset, int32_t sets, int32_t slots,
               int32_t num_local_experts, const std::vector<int64_t>& bytes, int64_t base,
               int64_t align, std::vector<Range>* ranges) {
  const size_t count = bytes.size();
  CHECK_EQ(offset.size(), sets * count);
  for (size_t at = 0; at < offset.size(); ++at) {
    const size_t i = at % count;
    const int64_t begin = offset[at], end = begin + slots * bytes[i];
    CHECK(begin >= base);
    ranges->push_back({begin, end});
    if (align > 0) {
      CHECK_EQ(begin % align, 0);
      CHECK(begin - num_local_experts * bytes[i] >= base);
      ranges->push_back({begin - num_local_experts * bytes[i], begin});
      ranges->push_back({end, uec::round_up(end, align)});
    } else if (at < count) {
      CHECK_EQ(begin % uec::kSegmentAlign, 0);
    } else {
      CHECK_EQ(begin, offset[at - count] + slots * bytes[i]);
    }
  }
}

void check_layout(int32_t num_ranks, int32_t num_experts, int32_t slots, int32_t max_local_experts,
                  int64_t max_groups, const std::vector<int64_t>& segment_bytes,
                  const SlotGradients& slot_grads = {}, const Sets& sets = {}) {
  const uec::Topology t{
      .num_ranks = num_ranks, .num_experts = num_experts, .slots_per_rank = slots};
  const int32_t num_segments = static_cast<int32_t>(segment_bytes.size());
  std::vector<int64_t> slot_offset(sets.num_banks * segment_bytes.size());
  std::vector<int64_t> grad_offset(sets.num_grad_banks * slot_grads.bytes.size());
  const uec::Gradients grads{static_cast<int32_t>(slot_grads.bytes.size()), slot_grads.bytes.data(),
                             slot_grads.type.data(), grad_offset.data()};
  const auto layout = uec::SymmetricLayout::make(
      t, max_local_experts, max_groups, num_segments, segment_bytes.data(), slot_offset.data(),
      grads, slot_grads.tile_bytes, grad_offset.data(), sets.num_banks, sets.num_grad_banks,
      sets.instance_align);
  std::vector<Range> ranges{{layout.doorbell, layout.doorbell + 8}};
  const auto flag = [&ranges](int64_t at) {
    CHECK_EQ(at % 8, 0);
    ranges.push_back({at, at + 8});
  };
  std::set<int64_t> lines{layout.doorbell / uec::kFlagLine};
  const auto padded = [&](int64_t at) {
    flag(at);
    CHECK_EQ(at % uec::kFlagLine, 0);
    CHECK(lines.insert(at / uec::kFlagLine).second);
  };
  for (int32_t r = 0; r < num_ranks; ++r) {
    padded(layout.call(r));
    padded(layout.open(r));
    flag(layout.abort(r));
    flag(layout.gathered(r));
    for (int32_t i = 0; i < slots; ++i) padded(layout.done(i, r));
    for (int32_t i = 0; i < slots && grads.num_segments > 0; ++i) padded(layout.consumed(i, r));
    for (int32_t i = 0; i < max_local_experts; ++i) flag(layout.pulled(i, r));
    const int64_t row = layout.load(r, num_experts);
    ranges.push_back({row, row + int64_t{4} * num_experts});
    CHECK_EQ(row, layout.load(0, 0) + int64_t{4} * num_experts * r);  // read as one table
  }
  for (int32_t i = 0; i < slots; ++i)
    for (int64_t group = 0; group < max_groups; ++group) flag(layout.ready(i, group));
  for (int32_t i = 0; i < max_local_experts; ++i)
    for (int64_t group = 0; group < layout.max_grad_groups; ++group) flag(layout.summed(i, group));
  CHECK_EQ(layout.slots_base % uec::kSlotAlign, 0);
  for (const Range& range : ranges) CHECK(range.end <= layout.slots_base);
  add_slots(slot_offset, sets.num_banks, slots, max_local_experts, segment_bytes, layout.slots_base,
            sets.instance_align, &ranges);
  add_slots(grad_offset, sets.num_grad_banks, slots, max_local_experts, slot_grads.bytes,
            layout.slots_base, sets.instance_align, &ranges);
  int64_t tiles = 0;
  bool apart = false;  // sums that do not fit where they are added up
  for (int32_t i = 0; i < grads.num_segments; ++i) {
    tiles += uec::ceil_div(grads.bytes[i], slot_grads.tile_bytes);
    apart |= grads.type[i] == uec::GradType::kBFloat16;
  }
  CHECK_EQ(layout.max_grad_groups, uec::max_grad_groups(tiles, slot_grads.tile_bytes));
  CHECK_EQ(layout.sums_bytes, apart ? uec::sums_bytes(tiles, slot_grads.tile_bytes) : 0);
  for (int32_t i = 0; i < slots && apart; ++i) {
    CHECK_EQ(layout.sums(i) % uec::kSegmentAlign, 0);
    ranges.push_back({layout.sums(i), layout.sums(i) + layout.sums_bytes});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  CHECK(ranges.front().begin >= 0);
  for (size_t i = 1; i < ranges.size(); ++i) CHECK(ranges[i - 1].end <= ranges[i].begin);
  CHECK(ranges.back().end <= layout.total);
  CHECK_EQ(layout.total % uec::kSlotAlign, 0);
}

}  // namespace

int main() {
  check_layout(1, 1, 0, 1, 0, {1});
  check_layout(1, 3, 1, 3, 1, {1, 3});
  check_layout(2, 5, 1, 4, 3, {4095, 1, 4097});
  check_layout(8, 32, 2, 4, 37, {1 << 20, 3, 255, 257});
  check_layout(13, 50, 3, 50, 5, {1, 1, 1, 1});
  check_layout(72, 288, 4, 4, 100, {int64_t{3} << 30, int64_t{5} << 30});  // beyond 32 bits
  constexpr auto kFloat32 = uec::GradType::kFloat32, kBFloat16 = uec::GradType::kBFloat16;
  check_layout(1, 1, 0, 1, 0, {1}, {{4}, {kFloat32}});
  check_layout(2, 5, 1, 4, 3, {4095, 1, 4097}, {{4096, 2}, {kBFloat16, kBFloat16}, 1 << 10});
  check_layout(8, 32, 2, 4, 37, {3, 255}, {{1 << 20, 100}, {kFloat32, kFloat32}});
  check_layout(13, 50, 3, 50, 5, {1, 1}, {{(200 << 10) + 2, 12}, {kBFloat16, kFloat32}});
  check_layout(72, 288, 4, 4, 100, {8}, {{int64_t{5} << 30}, {kBFloat16}, 1 << 20});
  for (const int64_t align : {0, 4096, 2 << 20}) {
    check_layout(2, 5, 1, 4, 3, {4095, 1, 4097}, {{4096, 2}, {kBFloat16, kBFloat16}, 1 << 10},
                 {1, 1, align});
    check_layout(8, 32, 2, 4, 37, {1 << 20, 3, 255}, {{1 << 20, 100}, {kFloat32, kFloat32}},
                 {5, 2, align});
    check_layout(3, 3, 0, 1, 5, {1, 4096}, {{12}, {kFloat32}}, {2, 2, align});
    check_layout(72, 288, 4, 4, 100, {int64_t{3} << 30, 7}, {}, {61, 1, align});
  }
}
