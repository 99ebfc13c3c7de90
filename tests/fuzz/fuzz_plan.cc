// Any load on any group: what planner.hpp says of its plans holds, by counting alone.
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "core/plan/check.hpp"
#include "core/plan/planner.hpp"
#include "fuzz/bytes.hpp"
#include "fuzz/checks.hpp"
#include "support/check.hpp"

namespace {

struct Planned {
  std::vector<int32_t> slot_expert, slot_quota, home_quota;
  bool operator==(const Planned&) const = default;
};

// With scratch and outputs of exactly the sizes that planner.hpp states, full of `garbage`.
Planned plan(const uec::Topology& t, const std::vector<int64_t>& load,
             const uec::Objective& objective, uint8_t garbage) {
  const size_t num_slots = size_t(t.num_ranks) * t.slots_per_rank;
  const auto junk = static_cast<int32_t>(garbage * 0x01010101u);
  Planned p{std::vector<int32_t>(num_slots, junk), std::vector<int32_t>(num_slots, junk),
            std::vector<int32_t>(t.num_experts, junk)};
  std::vector<std::byte> memory(uec::planner_scratch_bytes(t), std::byte{garbage});
  uec::plan_replicas(t, load.data(), objective, uec::PlannerScratch(t, memory.data()),
                     p.slot_expert.data(), p.slot_quota.data(), p.home_quota.data());
  return p;
}

uec::Objective draw_objective(fuzz::Bytes& bytes) {
  uec::Objective objective;
  objective.by_cost = bytes.next() % 3 == 2;
  if (objective.by_cost) {
    objective.per_token = bytes.draw(0, (1 << 22) - 1);
    objective.per_transfer = bytes.draw(0, (int64_t{1} << (bytes.flag() ? 40 : 16)) - 1);
    objective.per_replica = bytes.draw(0, (int64_t{1} << (bytes.flag() ? 40 : 16)) - 1);
  } else if (bytes.flag()) {
    objective.target_ppm = bytes.draw(uec::kPpm, bytes.flag() ? uec::kMaxTargetPpm : 2 * uec::kPpm);
  }
  return objective;
}

std::vector<int64_t> draw_load(fuzz::Bytes& bytes, int32_t num_experts) {
  std::vector<int64_t> load;
  // All experts at most: the total stays below kMaxTotalLoad.
  const int64_t most =
      std::array{int64_t{3}, int64_t{40}, int64_t{3000}, uec::kMaxLoad}[bytes.next() % 4];
  for (int32_t e = 0; e < num_experts; ++e) load.push_back(bytes.draw(0, most));
  return load;
}

void check_plan(PlanCase c, const std::vector<int64_t>& load, const uec::Objective& objective) {
  const uec::Topology t = c.topology();
  const Planned p = plan(t, load, objective, 0);
  CHECK(p == plan(t, load, objective, 0xd5));  // nothing rests on what was in memory
  c.slot_expert = p.slot_expert;
  CHECK(fuzz::first_fault(c).fault == uec::PlanFault::kNone);
  fuzz::check_validate(c);

  std::vector<int64_t> served(p.home_quota.begin(), p.home_quota.end());
  std::vector<int64_t> before(t.num_ranks, 0), after(t.num_ranks, 0);
  std::vector<int64_t> imports(t.num_ranks, 0), exports(t.num_ranks, 0), copies(t.num_experts, 0);
  for (int32_t e = 0; e < t.num_experts; ++e) {
    CHECK(p.home_quota[e] >= 0);
    before[c.home[e]] += load[e];
    after[c.home[e]] += p.home_quota[e];
  }
  int64_t replicas = 0;
  for (int32_t r = 0; r < t.num_ranks; ++r) {
    bool is_empty = false;  // slots are filled from 0
    for (int32_t i = r * t.slots_per_rank; i < (r + 1) * t.slots_per_rank; ++i) {
      const int32_t e = p.slot_expert[i];
      CHECK(e >= 0 ? p.slot_quota[i] > 0 : p.slot_quota[i] == 0);
      CHECK(e < 0 || !is_empty);
      is_empty = e < 0;
      if (is_empty) continue;
      served[e] += p.slot_quota[i];
      after[r] += p.slot_quota[i];
      exports[c.home[e]] += copies[e]++ == 0;
      ++imports[r];
      ++replicas;
    }
  }
  CHECK(served == load);
  CHECK_EQ(replicas, c.num_replicas());

  const auto most = [](const std::vector<int64_t>& values) {
    return *std::max_element(values.begin(), values.end());
  };
  CHECK(most(after) <= most(before));
  // Ranks that may hold each other's experts share what they have, in whole tokens.
  int64_t least = 0, total = 0;
  for (int32_t r = 0; r < t.num_ranks; ++r) {
    int64_t sum = 0, ranks = 0;
    for (int32_t other = 0; other < t.num_ranks; ++other)
      if (t.allow_cross_domain || c.domain[other] == c.domain[r]) sum += before[other], ++ranks;
    least = std::max(least, uec::ceil_div(sum, ranks));
    total += before[r];
  }
  CHECK(most(after) >= least);
  // An exact plan of a single pool brings each rank to the mean's floor or its ceiling: a rank at
  // the ceiling may export.
  const bool is_exact = objective.is_exact() &&
                        (t.allow_cross_domain || std::count(c.domain.begin(), c.domain.end(),
                                                            c.domain[0]) == std::ssize(c.domain));
  for (int32_t r = 0; r < t.num_ranks; ++r)
    if (exports[r] > 0) CHECK(is_exact ? before[r] * t.num_ranks > total : before[r] > least);
  const int64_t transfer = std::max(most(imports), most(exports));
  if (objective.by_cost) {
    const auto cost = [&](int64_t tokens, int64_t moved, int64_t made) {
      return objective.per_token * tokens + objective.per_transfer * moved +
             objective.per_replica * made;
    };
    CHECK(cost(most(after), transfer, replicas) <= cost(most(before), 0, 0));
    return;
  }
  // Balanced enough without replicas: there are none. A group with a slot for every expert on every
  // rank is never short of one, and reaches what no placement is below.
  const auto is_met = [&](const std::vector<int64_t>& tokens) {
    const int64_t fewest = *std::min_element(tokens.begin(), tokens.end());
    if (is_exact) return most(tokens) == least && fewest == total / t.num_ranks;
    return most(tokens) == least || static_cast<__int128>(most(tokens)) * t.num_ranks * uec::kPpm <=
                                        static_cast<__int128>(total) * objective.target_ppm;
  };
  if (is_met(before)) CHECK_EQ(replicas, 0);
  if (t.slots_per_rank >= t.num_experts) CHECK(is_met(after));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  // Small ones too, where what can be reached is known, and loads that are nearly even.
  constexpr int32_t kMost[8][3] = {{9, 16, 5}, {9, 16, 5}, {9, 16, 5}, {9, 16, 3},
                                   {4, 6, 6},  {5, 5, 5},  {4, 4, 4},  {72, 128, 4}};
  const auto [ranks, experts, slots] = kMost[bytes.next() % 8];
  const PlanCase c = fuzz::draw_group(bytes, ranks, experts, slots);
  const uec::Objective objective = draw_objective(bytes);
  check_plan(c, draw_load(bytes, c.num_experts), objective);
  return 0;
}
