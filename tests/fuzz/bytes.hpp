// Cases from the bytes of a fuzzer: any bytes make a case, and bytes that end early one of zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "support/plans.hpp"
#include "support/routings.hpp"

namespace fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  // A value from `low` to `high`. As many bytes as the range needs, whatever they hold.
  int64_t draw(int64_t low, int64_t high) {
    const auto range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t value = 0;
    for (uint64_t rest = range; rest != 0; rest >>= 8) value = value << 8 | next();
    if (range != ~uint64_t{0}) value %= range + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + value);
  }
  int32_t small(int32_t low, int32_t high) { return static_cast<int32_t>(draw(low, high)); }
  bool flag() { return (next() & 1) != 0; }
  uint8_t next() { return at_ == end_ ? uint8_t{0} : *at_++; }

 private:
  const uint8_t *at_, *end_;
};

// A group without a plan. Home maps may be uneven, and leave ranks without local experts.
inline PlanCase draw_group(Bytes& bytes, int32_t max_ranks, int32_t max_experts,
                           int32_t max_slots) {
  const int32_t num_ranks = bytes.small(1, max_ranks);
  const int32_t num_experts = bytes.small(1, max_experts);
  PlanCase c = make_group(num_ranks, num_experts, bytes.small(0, max_slots));
  const uint8_t shape = bytes.next();
  if ((shape & 1) != 0)
    for (int32_t& home : c.home) home = bytes.small(0, num_ranks - 1);
  if ((shape & 2) != 0)
    for (int32_t& domain : c.domain) domain = bytes.small(0, num_ranks - 1);
  c.allow_cross_domain = (shape & 4) != 0;
  return c;
}

// Fills slots with any experts, legal or not; with `legal`, only where they may be.
inline void draw_slots(Bytes& bytes, PlanCase& c, bool legal) {
  const int32_t slots = c.slots_per_rank;
  for (int32_t i = 0; i < c.num_ranks * slots; ++i) {
    const int32_t expert = bytes.small(-2, c.num_experts);
    if (!legal) {
      c.slot_expert[i] = expert;
      continue;
    }
    const int32_t* const row = c.slot_expert.data() + i / slots * slots;
    if (expert >= 0 && expert < c.num_experts && c.topology().may_hold(expert, i / slots) &&
        std::count(row, row + slots, expert) == 0)
      c.slot_expert[i] = expert;
  }
}

// Segments of one expert: a few tiles together, with some wide exceptions.
inline std::vector<int64_t> draw_segments(Bytes& bytes, int64_t tile_bytes) {
  std::vector<int64_t> segments;
  for (int32_t count = bytes.small(1, 4); count > 0; --count) {
    const int64_t tiles = bytes.draw(0, bytes.flag() ? 40 : 4);
    segments.push_back(std::max<int64_t>(1, tiles * tile_bytes + bytes.draw(-3, 3)));
  }
  return segments;
}

// Loads by source and quotas of a plan: quotas that sum to the loads, unless `broken`.
inline RoutingCase draw_routing(Bytes& bytes) {
  RoutingCase c;
  c.group = draw_group(bytes, 9, 12, 3);
  const bool broken = bytes.next() % 4 == 3, large = bytes.next() % 4 == 3;
  draw_slots(bytes, c.group, !broken || bytes.flag());
  const PlanCase& group = c.group;
  const std::vector<int32_t> num_local = group.num_local_experts(), local_idx = group.local_idx();
  c.per_rank = *std::max_element(num_local.begin(), num_local.end()) + group.slots_per_rank;
  for (int32_t e = 0; e < group.num_experts; ++e)
    c.main_id.push_back(group.home[e] * c.per_rank + local_idx[e]);
  for (int32_t r = 0; r < group.num_ranks; ++r) c.slot_id.push_back(r * c.per_rank + num_local[r]);
  // Nine sources of such loads stay below 2^31.
  const int32_t most = large ? 230'000'000 : 24;
  for (int32_t i = 0; i < group.num_ranks * group.num_experts; ++i)
    c.load.push_back(bytes.flag() ? bytes.small(0, most) : 0);
  c.slot_quota.assign(group.slot_expert.size(), -7);  // of empty slots: ignored
  for (int32_t e = 0; e < group.num_experts; ++e) {
    int64_t left = 0;
    for (int32_t r = 0; r < group.num_ranks; ++r) left += c.load[r * group.num_experts + e];
    for (size_t i = 0; i < group.slot_expert.size(); ++i) {
      if (group.slot_expert[i] != e) continue;
      const int64_t quota = bytes.draw(0, left);
      c.slot_quota[i] = static_cast<int32_t>(quota);
      left -= quota;
    }
    c.home_quota.push_back(static_cast<int32_t>(left));
  }
  if (!broken) return c;
  for (int32_t times = bytes.small(0, 2); times > 0; --times) {
    std::vector<int32_t>* const arrays[] = {&c.load, &c.home_quota, &c.slot_quota};
    std::vector<int32_t>& values = *arrays[bytes.small(0, 2)];
    if (values.empty()) continue;
    const int32_t i = bytes.small(0, static_cast<int32_t>(values.size()) - 1);
    values[i] = bytes.flag() ? bytes.small(-2, 2) : bytes.small(INT32_MIN, INT32_MAX);
  }
  return c;
}

}  // namespace fuzz
