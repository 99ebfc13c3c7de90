// The planner on top of residents without Python, so that the sanitizers see its memory accesses:
// scratch and outputs are exactly as large as the headers say. What it leaves in the slots is what
// the next step begins with.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/plan/check.hpp"
#include "core/plan/resident_planner.hpp"
#include "support/check.hpp"

namespace {

using uec::Topology;

struct Case {
  int32_t num_ranks, num_experts, slots_per_rank, num_domains;
  bool contiguous;
};

struct Arrays {
  std::vector<int32_t> slot_expert, slot_quota, home_quota;

  explicit Arrays(const Topology& t)
      : slot_expert(t.num_ranks * t.slots_per_rank, -1),
        slot_quota(slot_expert.size(), 0),
        home_quota(t.num_experts) {}
  int64_t fullest(const Topology& t) const {
    std::vector<int64_t> tokens(t.num_ranks, 0);
    for (int32_t e = 0; e < t.num_experts; ++e) tokens[t.home[e]] += home_quota[e];
    for (size_t i = 0; i < slot_quota.size(); ++i) tokens[i / t.slots_per_rank] += slot_quota[i];
    return *std::max_element(tokens.begin(), tokens.end());
  }
};

std::vector<int64_t> draw_load(int32_t num_experts, std::mt19937& random) {
  std::vector<int64_t> load(num_experts);
  for (int32_t e = 0; e < num_experts; ++e) load[e] = random() % (20'000 / (1 + random() % 40));
  return load;
}

void check_steps(const Case& c, int64_t target_ppm, std::mt19937& random) {
  std::vector<int32_t> home(c.num_experts), domain(c.num_ranks);
  for (int32_t e = 0; e < c.num_experts; ++e)
    home[e] = c.contiguous ? e * c.num_ranks / c.num_experts : random() % c.num_ranks;
  for (int32_t r = 0; r < c.num_ranks; ++r) domain[r] = r % c.num_domains;
  const Topology t{.num_ranks = c.num_ranks,
                   .num_experts = c.num_experts,
                   .slots_per_rank = c.slots_per_rank,
                   .home = home.data(),
                   .domain = domain.data()};
  Arrays held(t);
  std::vector<int64_t> load = draw_load(c.num_experts, random);
  for (int32_t step = 0; step < 8; ++step) {
    // One in three loads comes a second time.
    if (step % 3 != 2) load = draw_load(c.num_experts, random);
    int64_t total = 0;
    for (const int64_t tokens : load) total += tokens;

    Arrays empty(t), now(t);
    std::vector<std::byte> planner_memory(uec::planner_scratch_bytes(t));
    uec::plan_replicas(t, load.data(), {.target_ppm = target_ppm},
                       uec::PlannerScratch(t, planner_memory.data()), empty.slot_expert.data(),
                       empty.slot_quota.data(), empty.home_quota.data());
    std::vector<std::byte> memory(uec::resident_scratch_bytes(t));
    uec::plan_with_residents(t, load.data(), held.slot_expert.data(), target_ppm, memory.data(),
                             now.slot_expert.data(), now.slot_quota.data(), now.home_quota.data());
    if (step == 0) CHECK(now.slot_expert == empty.slot_expert);
    if (step == 0) CHECK(now.slot_quota == empty.slot_quota);

    CHECK(uec::check_plan(uec::SingleThread{}, t, now.slot_expert.data()).fault ==
          uec::PlanFault::kNone);
    std::vector<int64_t> served(now.home_quota.begin(), now.home_quota.end());
    int32_t moves = 0;
    for (size_t i = 0; i < now.slot_expert.size(); ++i) {
      const int32_t e = now.slot_expert[i], quota = now.slot_quota[i];
      CHECK(quota >= 0);
      moves += e != held.slot_expert[i];
      if (e != held.slot_expert[i]) CHECK(e >= 0 && quota > 0);
      if (e < 0) CHECK_EQ(quota, 0);
      if (e >= 0) served[e] += quota;
    }
    CHECK(served == load);
    CHECK(*std::min_element(now.home_quota.begin(), now.home_quota.end()) >= 0);
    const int64_t allowed = total * target_ppm / (t.num_ranks * uec::kPpm);
    CHECK(now.fullest(t) <= std::max(allowed, empty.fullest(t)));
    if (step % 3 == 2 && held.fullest(t) <= allowed) CHECK_EQ(moves, 0);
    held = now;
  }
}

}  // namespace

int main() {
  std::mt19937 random(11);
  const Case cases[] = {
      {.num_ranks = 1, .num_experts = 3, .slots_per_rank = 2, .num_domains = 1, .contiguous = true},
      {.num_ranks = 4, .num_experts = 8, .slots_per_rank = 1, .num_domains = 1, .contiguous = true},
      {.num_ranks = 8,
       .num_experts = 32,
       .slots_per_rank = 2,
       .num_domains = 1,
       .contiguous = true},
      {.num_ranks = 8,
       .num_experts = 32,
       .slots_per_rank = 3,
       .num_domains = 2,
       .contiguous = false},
      {.num_ranks = 6,
       .num_experts = 5,
       .slots_per_rank = 2,
       .num_domains = 3,
       .contiguous = false},
      {.num_ranks = 64,
       .num_experts = 256,
       .slots_per_rank = 2,
       .num_domains = 1,
       .contiguous = true},
      {.num_ranks = 5,
       .num_experts = 20,
       .slots_per_rank = 0,
       .num_domains = 1,
       .contiguous = true},
  };
  for (const Case& c : cases)
    for (const int64_t target_ppm : {uec::kPpm, int64_t{1'010'000}, int64_t{1'200'000}})
      for (int32_t i = 0; i < 20; ++i) check_steps(c, target_ppm, random);
  return 0;
}
