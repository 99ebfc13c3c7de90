// A reduction prepared by several threads is the one that one thread prepares, to the last integer.
#include <algorithm>

#include "core/crowd.hpp"
#include "core/reduce_cases.hpp"
#include "support/check.hpp"
#include "support/watchdog.hpp"

namespace {

struct Answer {
  uint64_t digest = 0;
  uint64_t schedule = 0, worklist = 0;  // what a member sees of them as soon as it can
  friend bool operator==(const Answer&, const Answer&) = default;
};

uint64_t sight_of(const uec::Schedule& s, int32_t num_ranks) {
  uint64_t sight = static_cast<uint64_t>(s.mode);
  for (int32_t i = 0; i < s.first[s.num_experts] + 2 * s.num_experts; ++i)
    sight = uec::mix(sight, s.boundary[i]);
  for (int32_t r = 0; r < num_ranks; ++r) sight = uec::mix(sight, s.egress[r]);
  return sight;
}

uint64_t sight_of(const uec::Worklist& w, int32_t num_ranks) {
  uint64_t sight = uec::mix(w.num_reductions, w.num_expected);
  for (int32_t i = 0; i < w.num_reductions; ++i) sight = uec::mix(sight, w.reductions[i].first);
  for (int32_t i = 0; i < w.num_destinations; ++i) sight = uec::mix(sight, w.destinations[i].rank);
  for (int32_t i = 0; i < w.num_expected; ++i) sight = uec::mix(sight, w.expected[i].peer);
  for (int32_t r = 0; r < num_ranks; ++r)
    sight = uec::mix(sight, w.needs[r] + 2 * w.opens[r] + 4 * w.involved[r]);
  return sight;
}

// Every member calls this.
template <class Team>
Answer prepare(Team team, const ReduceCase& c, int32_t rank, Given& given) {
  Answer answer;
  answer.digest = prepare_reduction(team, c, rank, given);
  // The two parts once more: what they have written may be read when they are left.
  const uec::GroupTables tables = c.tables(rank);
  uec::Schedule& s = given.schedule.schedule;
  team.sync();
  const uec::ReduceArgs args = c.args();
  uec::make_reduction(team, tables.topology, given.call.tiles, args.slot_expert, args.slot_quota,
                      c.mode, c.cost, given.schedule.scratch, &given.shape, s);
  answer.schedule = sight_of(s, c.plan.num_ranks);
  team.sync();
  uec::build_reductions(team, tables.topology, given.call.tiles, s, tables.local_idx, rank, c.zero,
                        given.call.work);
  answer.worklist = sight_of(given.call.work, c.plan.num_ranks);
  return answer;
}

// The home of the expert with the most replicas: it has the most to add.
int32_t busiest_home(const PlanCase& plan) {
  const auto replicas = [&](int32_t e) {
    return std::count(plan.slot_expert.begin(), plan.slot_expert.end(), e);
  };
  int32_t most = 0;
  for (int32_t e = 1; e < plan.num_experts; ++e)
    if (replicas(e) > replicas(most)) most = e;
  return plan.home[most];
}

}  // namespace

int main() {
  const Watchdog watchdog("members that do not meet");
  constexpr int32_t kSizes[] = {2, 3, 8};  // of teams
  int wide = 0, reductions = 0;
  for (int32_t seed = 0; seed < 50; ++seed) {
    Random random(static_cast<uint32_t>(seed));
    const ReduceCase c(draw_case(random, seed % 8 == 0 ? 40 : 12), random);
    int32_t rank = draw(random, 0, c.plan.num_ranks - 1);
    if (seed % 2 == 1) rank = busiest_home(c.plan);
    Given expected(c.capacity(rank));
    const Answer answer = prepare(uec::SingleThread{}, c, rank, expected);
    wide += expected.shape.max_fanout >= 8;
    reductions += expected.call.work.num_reductions;
    for (const int32_t size : kSizes) {
      Given given(c.capacity(rank));
      if (seed % 2 == 0) {  // storage that another call has used
        ReduceCase other = c;
        other.mode = static_cast<int32_t>(uec::Mode::kDirect);
        other.zero = !c.zero;
        prepare(uec::SingleThread{}, other, rank, given);
      }
      for (const Answer& own : Crowd::run(size, [&] { return prepare(Crowd{}, c, rank, given); }))
        CHECK(own == answer);
      check_equal(given.schedule.schedule, expected.schedule.schedule, c.plan.num_ranks);
      check_equal(given.call.work, expected.call.work, c.plan.num_ranks);
      CHECK_EQ(given.call.tiles.num_tiles(), expected.call.tiles.num_tiles());
      check_equal(given.call.main_type, expected.call.main_type, c.num_segments());
    }
  }
  CHECK(wide > 0 && reductions > 0);
}
