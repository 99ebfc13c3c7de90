// A probe run by a team of several threads finds what a team of one finds, also where it is packed.
#include <algorithm>
#include <cstdio>

#include "core/crowd.hpp"
#include "core/plan/packed_probe.hpp"
#include "core/plan/planner.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::Pool;
using uec::Question;
using uec::Replica;
using uec::SingleThread;

constexpr int32_t kSizes[] = {1, 2, 3, 5, 8};  // of teams

// Counts what was covered, so that a test that covers nothing fails.
struct Seen {
  int plans, level_plans, packed, packed_plans;
};

// The arrays of packed probes, as a sort on a device leaves them, of a load with one pool.
struct Packed {
  std::vector<int32_t> rank_tokens, local_tokens;
  std::vector<uec::LocalRow> rows;

  explicit Packed(uec::SortedLoad* sorted) {
    const Pool pool = sorted->pool(0);
    for (int32_t i = 0; i < pool.num_ranks; ++i) {
      const int32_t begin = pool.local_begin[pool.ranks[i]];
      const int32_t end = pool.local_begin[pool.ranks[i] + 1];
      rank_tokens.push_back(static_cast<int32_t>(pool.rank_load(i)));
      rows.push_back({begin, end - begin});
      sorted->max_local_experts = uec::max32(sorted->max_local_experts, end - begin);
    }
    for (int32_t i = 0; i < pool.local_begin[pool.num_ranks]; ++i)
      local_tokens.push_back(static_cast<int32_t>(pool.load[pool.local_experts[i]]));
    sorted->rank_tokens = rank_tokens.data();
    sorted->rows = rows.data();
    sorted->local_tokens = local_tokens.data();
  }
};

void check_probes(uint32_t seed, Seen* seen) {
  Random random(seed);
  const int32_t num_ranks = draw(random, 1, 24);
  PlanCase group = make_group(num_ranks, draw(random, 1, 4 * num_ranks), draw(random, 1, 3));
  for (int32_t& home : group.home) home = draw(random, 0, num_ranks - 1);
  const uec::Topology topology = group.topology();
  std::vector<int64_t> load(group.num_experts);
  const int32_t kinds[] = {4, 100000, 1 << 26};  // many ties, none, and too much to pack
  const int32_t most = kinds[draw(random, 0, 2)];
  for (size_t e = 0; e < load.size(); ++e) load[e] = draw(random, 0, most) / (1 + e % 5);
  std::vector<std::byte> sorting(uec::planner_scratch_bytes(topology));
  const uec::PlannerScratch s(topology, sorting.data());
  uec::SortedLoad sorted = uec::detail::sort_load(topology, load.data(), s);
  uec::detail::sort_local_experts(topology, 0, s, &sorted);
  const Pool pool = sorted.pool(0);
  uec::SortedLoad packable = sorted;
  const Packed packed(&packable);
  const int64_t mean = sorted.pool_mean(0);

  std::vector<std::byte> memory(uec::TeamScratch(topology, nullptr).bytes);
  for (int32_t variant = 0; variant < uec::kNumVariants; ++variant) {
    const int64_t above = pool.fullest() > mean ? pool.fullest() - mean : 0;
    const int64_t threshold = mean + draw(random, 0, 8) * above / 16;
    const Question question{threshold, draw(random, 1, group.slots_per_rank),
                            draw(random, 1, sorted.last_cap), variant,
                            draw(random, 0, 1) == 0 ? 0x7FFFFFFF : draw(random, 0, 2 * num_ranks)};
    const uec::TeamScratch scratch(topology, memory.data());
    const uec::ProbeScratch shared{scratch.tokens_left, scratch.cool};
    const int32_t expected_count =
        uec::probe(SingleThread{}, pool, question, shared, scratch.trial);
    const int32_t num_replicas = expected_count < 0 ? 0 : expected_count;
    const std::vector<Replica> expected(scratch.trial, scratch.trial + num_replicas);
    seen->plans += num_replicas > 0;
    seen->level_plans += num_replicas > 0 && variant / uec::kNumOrders == uec::kLevel;
    for (const int32_t size : kSizes) {
      for (const uec::SortedLoad& from : {sorted, packable}) {
        std::fill_n(scratch.trial, num_replicas, Replica{-1, -1, -1, -1});
        const auto packs = Crowd::run(
            size, [&] { return int32_t{uec::can_pack(Crowd{}, from.pool(0), question)}; });
        CHECK(from.rows != nullptr || !packs[0]);
        seen->packed += packs[0];
        seen->packed_plans += packs[0] && num_replicas > 0;
        const auto counts = Crowd::run(size, [&] {
          return uec::fastest_probe(Crowd{}, from, 0, question, shared, scratch.trial);
        });
        for (const int32_t count : counts) CHECK_EQ(count, expected_count);
        for (int32_t i = 0; i < num_replicas; ++i) {
          CHECK_EQ(scratch.trial[i].local_pos, expected[i].local_pos);
          CHECK_EQ(scratch.trial[i].place, expected[i].place);
          CHECK_EQ(scratch.trial[i].slot, expected[i].slot);
          CHECK_EQ(scratch.trial[i].quota, expected[i].quota);
        }
      }
    }
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("members that do not meet");
  Seen seen{};
  const int cases = kPart == 1 ? 60 : 30;  // as many as the mutants need
  for (int seed = 0; seed < cases; ++seed) check_probes(static_cast<uint32_t>(seed), &seen);
  std::printf("%d cases, %d plans, %d packed probes, %d of them with a plan\n", cases, seen.plans,
              seen.packed, seen.packed_plans);
  CHECK(seen.plans > cases);
  CHECK(seen.level_plans > cases / 4);
  CHECK(seen.packed_plans > cases);
}
