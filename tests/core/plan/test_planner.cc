// The planner and the reroute without Python, so that the sanitizers see their memory accesses:
// scratch and outputs are exactly as large as the headers say. The Python tests check the values in
// detail.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/plan/planner.hpp"
#include "core/reroute/reroute.hpp"
#include "support/check.hpp"

namespace {

using uec::Topology;

struct Case {
  int32_t num_ranks, num_experts, slots_per_rank, num_domains;
  int32_t max_load;  // tokens of an expert from one source
  bool contiguous;
};

// Reroutes the same tokens as a map, a row for each: they move where the ids went.
void check_map(const Topology& topology, const int32_t* row, int32_t row_size,
               const uec::RerouteScratch& scratch, const std::vector<int32_t>& rerouted) {
  const int32_t num_experts = topology.num_experts;
  const auto num_tokens = static_cast<int64_t>(rerouted.size()) - 1;
  std::vector<uint8_t> map(num_tokens * num_experts, 0);
  std::vector<int64_t> expected_from, from(num_tokens), to(num_tokens);
  for (int32_t e = 0; e < num_experts; ++e) {
    for (int32_t i = 0; i < row[e]; ++i) {
      const int64_t position = static_cast<int64_t>(expected_from.size()) * num_experts + e;
      expected_from.push_back(position);
      map[position] = 1;
    }
  }
  auto status = uec::reroute_map(topology, map.data(), num_tokens, scratch, from.data(), to.data());
  CHECK(status.fault == uec::RerouteFault::kNone);
  CHECK(from == expected_from);
  for (int64_t t = 0; t < num_tokens; ++t) CHECK_EQ(to[t], t * row_size + rerouted[t + 1]);

  if (num_tokens == 0) return;
  // Every entry at once: far more tokens than the load has, and no more moves than fit.
  std::fill(map.begin(), map.end(), uint8_t{1});
  status = uec::reroute_map(topology, map.data(), num_tokens, scratch, from.data(), to.data());
  CHECK_EQ(status.fault == uec::RerouteFault::kNone, num_experts == 1);
}

void check_case(const Case& c, std::mt19937& random) {
  const int32_t num_ranks = c.num_ranks, num_experts = c.num_experts, slots = c.slots_per_rank;
  std::vector<int32_t> home(num_experts), domain(num_ranks), load(num_ranks * num_experts);
  std::vector<int64_t> total(num_experts, 0);
  for (int32_t e = 0; e < num_experts; ++e) {
    home[e] = c.contiguous ? e * num_ranks / num_experts : random() % num_ranks;
  }
  for (int32_t r = 0; r < num_ranks; ++r) domain[r] = r % c.num_domains;
  for (int32_t e = 0; e < num_experts; ++e) {
    const int32_t most = 1 + static_cast<int32_t>(random() % c.max_load) / (1 + e % 13);
    for (int32_t r = 0; r < num_ranks; ++r) {
      total[e] += load[r * num_experts + e] = static_cast<int32_t>(random() % most);
    }
  }
  const Topology topology{.num_ranks = num_ranks,
                          .num_experts = num_experts,
                          .slots_per_rank = slots,
                          .home = home.data(),
                          .domain = domain.data()};

  std::vector<int32_t> slot_expert(num_ranks * slots), slot_quota(num_ranks * slots);
  std::vector<int32_t> home_quota(num_experts);
  const uec::Objective objective{.target_ppm = 1'010'000,
                                 .by_cost = random() % 2 == 0,
                                 .per_token = 1 << 10,
                                 .per_transfer = 1 << 20,
                                 .per_replica = 1 << 8};
  std::vector<std::byte> plan_memory(uec::planner_scratch_bytes(topology));
  uec::plan_replicas(topology, total.data(), objective,
                     uec::PlannerScratch(topology, plan_memory.data()), slot_expert.data(),
                     slot_quota.data(), home_quota.data());

  std::vector<int64_t> served(home_quota.begin(), home_quota.end());
  std::vector<int64_t> before(num_ranks, 0), after(num_ranks, 0);
  for (int32_t e = 0; e < num_experts; ++e) {
    before[home[e]] += total[e];
    after[home[e]] += home_quota[e];
  }
  for (int32_t i = 0; i < num_ranks * slots; ++i) {
    CHECK_EQ(slot_expert[i] == -1, slot_quota[i] == 0);
    if (slot_expert[i] == -1) continue;
    CHECK(topology.may_hold(slot_expert[i], i / slots));
    served[slot_expert[i]] += slot_quota[i];
    after[i / slots] += slot_quota[i];
  }
  for (int32_t e = 0; e < num_experts; ++e) CHECK_EQ(served[e], total[e]);
  CHECK(*std::max_element(after.begin(), after.end()) <=
        *std::max_element(before.begin(), before.end()));

  // Every rank's tokens, expert by expert: in all, each rank receives what the plan says.
  const uec::QuotaPlan plan{.load = load.data(),
                            .slot_expert = slot_expert.data(),
                            .slot_quota = slot_quota.data(),
                            .home_quota = home_quota.data()};
  std::vector<std::byte> memory(uec::reroute_scratch_bytes(topology));
  const uec::RerouteScratch scratch(topology, memory.data());
  std::vector<int32_t> local_begin(num_ranks + 1), local_experts(num_experts);
  const int32_t stride =
      uec::group_local_experts(topology, local_begin.data(), local_experts.data()) + slots;
  std::vector<int64_t> received(num_ranks, 0);
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const int32_t* row = load.data() + rank * num_experts;
    std::vector<int32_t> ids{-1};
    for (int32_t e = 0; e < num_experts; ++e) ids.insert(ids.end(), row[e], e);
    std::vector<int32_t> out(ids.size());
    auto status = uec::compute_shares(topology, plan, rank, scratch);
    CHECK(status.fault == uec::RerouteFault::kNone);
    status = uec::reroute_tokens(ids.data(), static_cast<int64_t>(ids.size()), num_experts, scratch,
                                 out.data());
    CHECK(status.fault == uec::RerouteFault::kNone);
    CHECK_EQ(out[0], -1);
    for (size_t j = 1; j < out.size(); ++j) ++received[out[j] / stride];
    check_map(topology, row, num_ranks * stride, scratch, out);

    if (row[0] == 0) continue;
    ids[1] = -1;  // one token of expert 0 less than the load says
    status = uec::reroute_tokens(ids.data(), static_cast<int64_t>(ids.size()), num_experts, scratch,
                                 out.data());
    CHECK(status.fault == uec::RerouteFault::kCountMismatch);
    CHECK_EQ(status.expert, 0);
    CHECK_EQ(status.counted, row[0] - 1);
    ids.assign(row[0] + 1, 0);  // and one more
    out.resize(ids.size());
    status = uec::reroute_tokens(ids.data(), static_cast<int64_t>(ids.size()), num_experts, scratch,
                                 out.data());
    CHECK(status.fault == uec::RerouteFault::kCountMismatch);
    CHECK_EQ(status.counted, row[0] + 1);
  }
  for (int32_t r = 0; r < num_ranks; ++r) CHECK_EQ(received[r], after[r]);
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 20; ++repeat) {
    check_case({1, 5, 2, 1, 40, true}, random);
    check_case({4, 4, 1, 1, 40, true}, random);
    check_case({8, 32, 1, 2, 100, true}, random);
    check_case({8, 32, 0, 1, 100, true}, random);
    check_case({13, 50, 3, 3, 60, false}, random);
  }
  check_case({64, 256, 2, 1, 60, true}, random);
  check_case({64, 256, 2, 8, 60, false}, random);
}
