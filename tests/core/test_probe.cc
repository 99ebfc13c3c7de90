// A probe run by a team of several threads finds what a team of one finds.
#include <cstdio>

#include "check.hpp"
#include "core/crowd.hpp"
#include "core/planner.hpp"
#include "host/watchdog.hpp"
#include "plans.hpp"

namespace {

using uec::Alone;
using uec::Pool;
using uec::Question;
using uec::Replica;

constexpr int32_t kSizes[] = {1, 2, 3, 5, 8};  // of teams

void check_probes(uint32_t seed, int* num_found) {
  Random random(seed);
  const int32_t num_ranks = draw(random, 1, 24);
  PlanCase group = make_group(num_ranks, draw(random, 1, 4 * num_ranks), draw(random, 1, 3));
  for (int32_t& home : group.home) home = draw(random, 0, num_ranks - 1);
  const uec::Topology topology = group.topology();
  std::vector<int64_t> load(group.num_experts);
  const int32_t most = draw(random, 0, 1) == 0 ? 6 : 100000;  // many ties, or none
  for (size_t e = 0; e < load.size(); ++e) load[e] = draw(random, 0, most) / (1 + e % 5);
  std::vector<std::byte> sorting(uec::planner_scratch_bytes(topology));
  const uec::PlannerScratch s(topology, sorting.data());
  uec::SortedLoad sorted = uec::detail::sort_load(topology, load.data(), s);
  uec::detail::sort_mains(topology, 0, s, &sorted);
  const Pool pool = sorted.pool(0);
  const int64_t mean = sorted.pool_mean(0);

  std::vector<std::byte> memory(uec::TeamScratch(topology, nullptr).bytes);
  for (int32_t variant = 0; variant < uec::kNumVariants; ++variant) {
    const int64_t above = pool.fullest() > mean ? pool.fullest() - mean : 0;
    const int64_t threshold = mean + draw(random, 0, 8) * above / 16;
    const Question ask{threshold, draw(random, 1, group.slots_per_rank),
                       draw(random, 1, sorted.last_cap), variant};
    const uec::TeamScratch scratch(topology, memory.data());
    const uec::ProbeScratch shared{scratch.have, scratch.cool};
    const int32_t expected_count = uec::probe(Alone{}, pool, ask, shared, scratch.trial);
    const int32_t num_replicas = expected_count < 0 ? 0 : expected_count;
    const std::vector<Replica> expected(scratch.trial, scratch.trial + num_replicas);
    *num_found += num_replicas > 0;
    for (const int32_t size : kSizes) {
      const auto counts =
          Crowd::run(size, [&] { return uec::probe(Crowd{}, pool, ask, shared, scratch.trial); });
      for (const int32_t count : counts) CHECK_EQ(count, expected_count);
      for (int32_t i = 0; i < num_replicas; ++i) {
        CHECK_EQ(scratch.trial[i].expert, expected[i].expert);
        CHECK_EQ(scratch.trial[i].rank, expected[i].rank);
        CHECK_EQ(scratch.trial[i].slot, expected[i].slot);
        CHECK_EQ(scratch.trial[i].quota, expected[i].quota);
      }
    }
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("members that do not meet");
  int num_found = 0;
  const int cases = scaled(60);
  for (int seed = 0; seed < cases; ++seed) check_probes(static_cast<uint32_t>(seed), &num_found);
  std::printf("%d cases, %d plans\n", cases, num_found);
  CHECK(num_found > cases);
}
