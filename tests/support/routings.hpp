// Random plans with quotas, and routings that their loads count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/reroute/reroute.hpp"
#include "core/reroute/share_table.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

// Everything that the reroute of one source rank is given.
struct RoutingCase {
  PlanCase group;
  std::vector<int32_t> load, slot_quota, home_quota, main_id, slot_id;
  std::vector<int32_t> home;  // that the plan was made for; empty: the group's
  int32_t per_rank = 0, source = 0;

  uec::QuotaPlan plan() const {
    return {load.data(), group.slot_expert.data(), slot_quota.data(), home_quota.data(),
            home.empty() ? nullptr : home.data()};
  }
  uec::InstanceIds ids() const { return {per_rank, main_id.data(), slot_id.data()}; }
  const int32_t* row() const { return load.data() + int64_t{source} * group.num_experts; }
  int32_t num_entries() const {
    return group.num_experts + static_cast<int32_t>(slot_id.size()) * group.slots_per_rank;
  }
};

inline RoutingCase draw_group(Random& random, int32_t num_ranks, int32_t num_experts,
                              int32_t slots_per_rank) {
  RoutingCase c;
  c.group = make_group(num_ranks, num_experts, slots_per_rank);
  if (draw(random, 0, 1) == 0)
    for (int32_t& home : c.group.home) home = draw(random, 0, num_ranks - 1);
  const std::vector<int32_t> num_local = c.group.num_local_experts();
  const std::vector<int32_t> local_idx = c.group.local_idx();
  c.per_rank = *std::max_element(num_local.begin(), num_local.end()) + slots_per_rank;
  for (int32_t e = 0; e < num_experts; ++e)
    c.main_id.push_back(c.group.home[e] * c.per_rank + local_idx[e]);
  for (int32_t r = 0; r < num_ranks; ++r) c.slot_id.push_back(r * c.per_rank + num_local[r]);
  c.source = draw(random, 0, num_ranks - 1);
  return c;
}

// `most`: tokens of an expert from one source.
inline void draw_plan(RoutingCase& c, Random& random, int32_t most) {
  PlanCase& group = c.group;
  const int32_t num_ranks = group.num_ranks, num_experts = group.num_experts;
  group.clear();
  const int32_t hot = draw(random, 0, num_experts - 1);  // has many of the replicas
  for (int32_t i = 0; i < num_ranks * group.slots_per_rank; ++i)
    if (draw(random, 0, 3) != 0)
      group.place(draw(random, 0, 1) == 0 ? hot : draw(random, 0, num_experts - 1),
                  draw(random, 0, num_ranks - 1));
  c.home.clear();
  if (draw(random, 0, 1) == 0) c.home = group.home;
  c.load.clear();
  for (int32_t i = 0; i < num_ranks * num_experts; ++i)
    c.load.push_back(draw(random, 0, 3) == 0 ? 0 : draw(random, 0, most));
  // Each quota is any part of what is left of the load.
  c.home_quota.clear();
  c.slot_quota.assign(group.slot_expert.size(), -7);
  for (int32_t e = 0; e < num_experts; ++e) {
    int64_t left = 0;
    for (int32_t r = 0; r < num_ranks; ++r) left += c.load[r * num_experts + e];
    for (size_t i = 0; i < group.slot_expert.size(); ++i) {
      if (group.slot_expert[i] != e) continue;
      const auto quota = std::min<int64_t>(left, draw(random, 0, 2 * most));
      c.slot_quota[i] = static_cast<int32_t>(quota);
      left -= quota;
    }
    c.home_quota.push_back(static_cast<int32_t>(left));
  }
}

// Breaks the plan in one place or two.
inline void break_plan(RoutingCase& c, Random& random) {
  const auto any = [&](std::vector<int32_t>& values) -> int32_t& {
    return values[draw(random, 0, static_cast<int32_t>(values.size()) - 1)];
  };
  for (int32_t times = draw(random, 1, 2); times > 0; --times) {
    switch (draw(random, 0, 6)) {
      case 6:
        if (!c.home.empty()) any(c.home) = draw(random, -1, c.group.num_ranks);
        break;
      case 0:
        any(c.load) = draw(random, -3, 3);
        break;
      case 1:
        any(c.load) = 0x7fffffff;
        break;
      case 2:
        any(c.home_quota) = draw(random, -3, 3);
        break;
      case 3:
        if (!c.slot_quota.empty()) any(c.slot_quota) += draw(random, -9, 9);
        break;
      default:
        if (!c.group.slot_expert.empty())
          any(c.group.slot_expert) = draw(random, -2, c.group.num_experts);
    }
  }
}

inline void check_equal(const uec::RerouteStatus& a, const uec::RerouteStatus& b) {
  CHECK_EQ(static_cast<int32_t>(a.fault), static_cast<int32_t>(b.fault));
  CHECK_EQ(a.expert, b.expert);
  CHECK_EQ(a.counted, b.counted);
  CHECK_EQ(a.expected, b.expected);
  CHECK_EQ(a.position, b.position);
  CHECK_EQ(a.value, b.value);
}

// compute_shares(), with its working memory.
class HostShares {
 public:
  explicit HostShares(const RoutingCase& c)
      : memory_(uec::reroute_scratch_bytes(c.group.topology()) / 8 + 1),
        scratch(c.group.topology(), reinterpret_cast<std::byte*>(memory_.data())),
        status(uec::compute_shares(c.group.topology(), c.plan(), c.source, scratch)) {}

  // The table says the same.
  void check(const uec::ShareTable& table, int32_t num_experts) const {
    for (int32_t e = 0; e < num_experts; ++e) {
      CHECK_EQ(table.begin[e], scratch.begin[e]);
      int32_t upto = 0;
      for (int32_t i = scratch.begin[e]; i < scratch.begin[e + 1]; ++i) {
        upto += scratch.share[i];
        CHECK_EQ(table.entries[i].upto, upto);
        CHECK_EQ(table.entries[i].physical_id, scratch.physical_id[i]);
      }
    }
    CHECK_EQ(table.begin[num_experts], scratch.begin[num_experts]);
  }

 private:
  std::vector<uint64_t> memory_;

 public:
  const uec::RerouteScratch scratch;
  const uec::RerouteStatus status;
};
