// Rounds of any schedule: everything arrives once, what is forwarded has arrived before, few rounds
// are needed, and ranks that issue theirs in order never wait in a circle.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "c10d/rounds.hpp"
#include "core/schedule/reduce_schedule.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::Mode;
using uec::Schedule;
using uec::c10d::Hop;
using uec::c10d::kSum;
using uec::c10d::Rounds;

constexpr int32_t kNever = -1;

std::vector<const Hop*> by_round(const Rounds& rounds) {
  std::vector<const Hop*> hops;
  for (const Hop& hop : rounds.hops) hops.push_back(&hop);
  std::stable_sort(hops.begin(), hops.end(),
                   [](const Hop* a, const Hop* b) { return a->round < b->round; });
  return hops;
}

void check_one_chunk_each_way(const Rounds& rounds, int32_t num_ranks) {
  std::vector<int32_t> sends(num_ranks, kNever), receives(num_ranks, kNever);
  std::vector<bool> used(rounds.num_rounds);
  for (const Hop* hop : by_round(rounds)) {
    CHECK(0 <= hop->round && hop->round < rounds.num_rounds);
    CHECK(hop->from != hop->to && hop->begin < hop->end);
    CHECK(sends[hop->from] < hop->round && receives[hop->to] < hop->round);
    sends[hop->from] = receives[hop->to] = hop->round;
    used[hop->round] = true;
  }
  CHECK(std::find(used.begin(), used.end(), false) == used.end());
}

// A gate opens with the last of its arrivals, and what waits behind it leaves later.
void check_gates(const Rounds& rounds) {
  std::vector<int32_t> last(rounds.gates.size(), kNever);
  for (const Hop& hop : rounds.hops)
    if (hop.opens >= 0) last[hop.opens] = std::max(last[hop.opens], hop.round);
  for (size_t i = 0; i < last.size(); ++i) {
    CHECK_EQ(rounds.gates[i].missing, 0);
    CHECK_EQ(rounds.gates[i].opened, last[i]);
  }
  for (const Hop& hop : rounds.hops)
    if (hop.behind >= 0) CHECK(hop.round > rounds.gates[hop.behind].opened);
}

// Flag groups of an entry on each rank.
template <class T>
class OnRanks {
 public:
  OnRanks(const Schedule& s, int32_t num_ranks, int32_t groups)
      : num_ranks_(num_ranks), groups_(groups), all_(s.num_experts * num_ranks * groups) {}
  T& at(int32_t x, int32_t rank, int32_t group) {
    return all_[(x * num_ranks_ + rank) * groups_ + group];
  }

 private:
  int32_t num_ranks_, groups_;
  std::vector<T> all_;
};

void check_transfer(const Schedule& s, const Rounds& rounds, int32_t num_ranks, int32_t groups) {
  struct Arrival {
    int32_t count = 0, round = kNever;
  };
  OnRanks<Arrival> there(s, num_ranks, groups);
  for (const Hop* hop : by_round(rounds)) {
    CHECK(0 <= hop->replica && hop->replica < s.num_replicas(hop->entry));
    CHECK_EQ(s.replica_rank[s.first[hop->entry] + hop->replica], hop->to);
    const bool from_source = hop->from == s.source[hop->entry].rank;
    CHECK_EQ(hop->behind < 0, from_source);
    for (int32_t g = hop->begin; g < hop->end; ++g) {
      if (!from_source) {
        const Arrival& own = there.at(hop->entry, hop->from, g);
        CHECK(own.count == 1 && own.round <= rounds.gates[hop->behind].opened);
      }
      Arrival& arrival = there.at(hop->entry, hop->to, g);
      ++arrival.count;
      arrival.round = hop->round;
    }
  }
  for (int32_t x = 0; x < s.num_experts; ++x)
    for (int32_t i = s.first[x]; i < s.first[x + 1]; ++i)
      for (int32_t g = 0; g < groups; ++g) CHECK_EQ(there.at(x, s.replica_rank[i], g).count, 1);
}

void check_reduction(const Schedule& s, const Rounds& rounds, int32_t num_ranks, int32_t groups) {
  struct Sum {
    std::vector<int32_t> from;  // whose gradients have arrived
    int32_t round = kNever;
    bool left = false;
  };
  OnRanks<Sum> sums(s, num_ranks, groups);
  for (const Hop* hop : by_round(rounds)) {
    const int32_t first = s.first[hop->entry], n = s.num_replicas(hop->entry);
    const int32_t home = s.source[hop->entry].rank;
    if (hop->replica == kSum) CHECK(hop->to == home && hop->behind >= 0);
    for (int32_t g = hop->begin; g < hop->end; ++g) {
      Sum& to = sums.at(hop->entry, hop->to, g);
      if (hop->replica != kSum) {
        CHECK(0 <= hop->replica && hop->replica < n);
        CHECK_EQ(s.replica_rank[first + hop->replica], hop->from);
        to.from.push_back(hop->from);
      } else {  // of all others, and its own
        Sum& sum = sums.at(hop->entry, hop->from, g);
        CHECK(!sum.left && sum.round <= rounds.gates[hop->behind].opened);
        sum.left = true;
        sum.from.push_back(hop->from);
        CHECK(to.from.empty());
        to.from = sum.from;
      }
      to.round = hop->round;
    }
  }
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const std::vector<int32_t> all(s.replica_rank + s.first[x], s.replica_rank + s.first[x + 1]);
    const int32_t home = s.source[x].rank;
    for (int32_t g = 0; g < groups; ++g) {
      std::vector<int32_t>& at_home = sums.at(x, home, g).from;
      std::sort(at_home.begin(), at_home.end());
      CHECK(at_home == all);
      for (const int32_t rank : all) {
        const Sum& sum = sums.at(x, rank, g);
        CHECK(sum.left || sum.from.empty());  // nothing is summed in vain
      }
    }
  }
}

// Chunks that the busiest rank sends, or receives.
int32_t most_chunks(const Rounds& rounds, int32_t num_ranks) {
  std::vector<int32_t> out(num_ranks), in(num_ranks);
  for (const Hop& hop : rounds.hops) {
    ++out[hop.from];
    ++in[hop.to];
  }
  return std::max(*std::max_element(out.begin(), out.end()),
                  *std::max_element(in.begin(), in.end()));
}

// ---- no deadlock --------------------------------------------------------------------------------

constexpr int32_t kNoWindow = 1 << 30;

// Whether all chunks arrive where each rank issues its rounds in order. Ahead of round t it waits
// for its chunks of rounds up to t - window, and for those that bring what it sends on in t. A
// chunk arrives once both ends have started it: at once when issued or, where a backend runs
// `one_by_one` what a rank issues, when all that the rank has issued before has ended. That is the
// least that may happen: if ranks were ahead of each other in any other way, no more would wait.
bool ends(const Rounds& rounds, int32_t num_ranks, int32_t window, bool one_by_one) {
  struct Turn {
    int32_t round = 0, behind = kNever;
    std::vector<int32_t> hops;
  };
  std::vector<std::vector<Turn>> turns(num_ranks);
  const auto turn_of = [&](int32_t rank, int32_t round) -> Turn& {
    std::vector<Turn>& own = turns[rank];
    if (own.empty() || own.back().round != round) own.push_back({round, kNever, {}});
    return own.back();
  };
  for (const Hop* hop : by_round(rounds)) {
    const auto i = static_cast<int32_t>(hop - rounds.hops.data());
    Turn& from = turn_of(hop->from, hop->round);
    from.hops.push_back(i);
    if (hop->behind >= 0) from.behind = std::max(from.behind, rounds.gates[hop->behind].opened);
    turn_of(hop->to, hop->round).hops.push_back(i);
  }
  std::vector<int32_t> started(rounds.hops.size());  // ends that have
  const auto arrived = [&](int32_t i) { return started[i] == 2; };
  const auto over = [&](const Turn& turn) {
    return std::all_of(turn.hops.begin(), turn.hops.end(), arrived);
  };
  std::vector<size_t> issued(num_ranks), running(num_ranks);
  for (bool moved = true; moved;) {
    moved = false;
    for (int32_t r = 0; r < num_ranks; ++r) {
      const std::vector<Turn>& own = turns[r];
      const auto may_issue = [&](const Turn& turn) {
        for (const Turn& other : own)  // an earlier turn, or one that it waits for in vain
          for (const int32_t i : other.hops) {
            const bool brings = rounds.hops[i].to == r && other.round <= turn.behind;
            if ((brings || other.round <= turn.round - window) && !arrived(i)) return false;
          }
        return true;
      };
      while (issued[r] < own.size() && may_issue(own[issued[r]])) {
        ++issued[r];
        moved = true;
      }
      while (running[r] < issued[r]) {
        if (one_by_one && running[r] > 0 && !over(own[running[r] - 1])) break;
        for (const int32_t i : own[running[r]].hops) ++started[i];
        ++running[r];
        moved = true;
      }
    }
  }
  for (size_t i = 0; i < rounds.hops.size(); ++i)
    if (!arrived(static_cast<int32_t>(i))) return false;
  return true;
}

void check_ends(const Rounds& rounds, int32_t num_ranks) {
  for (const int32_t window : {1, 3, kNoWindow})
    for (const bool one_by_one : {false, true}) CHECK(ends(rounds, num_ranks, window, one_by_one));
}

// Orders that never end: `ends` sees them.
void check_circles() {
  Rounds rounds;  // a hub hands on in round 0 what comes in round 1
  rounds.hops = {{0, 1, 0, 0, 0, 1, 0, 0, -1, 1}, {1, 2, 0, 1, 0, 1, 0, -1, 0, 0}};
  rounds.gates = {{0, 1, 1}};
  rounds.num_rounds = 2;
  CHECK(!ends(rounds, 3, kNoWindow, false));
  std::swap(rounds.hops[0].round, rounds.hops[1].round);
  rounds.gates[0].opened = 0;
  check_ends(rounds, 3);
  // Two hubs, each of which waits in a round for what the other one sends in it.
  rounds.hops = {{0, 1, 0, 0, 0, 1, 0, 0, 1, 0}, {1, 0, 1, 0, 0, 1, 0, 1, 0, 0}};
  rounds.gates = {{0, 1, 0}, {0, 1, 0}};
  CHECK(!ends(rounds, 2, kNoWindow, false));
}

// ---- cases --------------------------------------------------------------------------------------

Rounds match(Rounds rounds, int32_t num_ranks) {
  uec::c10d::Matcher(num_ranks, rounds).run();
  return rounds;
}

Rounds transfer(const PlanCase& c, int32_t groups, int32_t chunk, Mode mode) {
  const Tiles tiles({groups * uec::kGroupBytes}, uec::kGroupBytes);
  const ScheduleArrays a(c, tiles.map(), mode);
  const Rounds rounds = match(uec::c10d::cut_transfer(a.schedule, chunk), c.num_ranks);
  check_transfer(a.schedule, rounds, c.num_ranks, groups);
  return rounds;
}

Rounds reduction(const PlanCase& c, int32_t groups, int32_t chunk, Mode mode) {
  const Tiles tiles({groups * uec::kGroupBytes}, uec::kGroupBytes);
  ScheduleArrays a(c, tiles.map(), Mode::kDirect);
  const uec::ScheduleScratch scratch{a.count.data(), a.exports.data(), a.order.data(),
                                     a.extra.data()};
  uec::collect_replicas(uec::SingleThread{}, c.topology(), c.slot_expert.data(),
                        uec::SlotsWithTokens{}, scratch, a.schedule);
  uec::assign_sums(uec::SingleThread{}, c.topology(), groups, mode, a.schedule);
  const Rounds rounds = match(uec::c10d::cut_reduction(a.schedule, chunk), c.num_ranks);
  check_reduction(a.schedule, rounds, c.num_ranks, groups);
  return rounds;
}

void check_rounds(const Rounds& rounds, int32_t num_ranks) {
  check_one_chunk_each_way(rounds, num_ranks);
  check_gates(rounds);
  check_ends(rounds, num_ranks);
  // The last chunk of an expert goes through one rank after another.
  CHECK(rounds.num_rounds <= 1.35 * most_chunks(rounds, num_ranks) + num_ranks);
}

// Busy links stay busy where the order in which chunks leave matters.
void check_known() {
  PlanCase two = make_group(16, 16, 2);
  for (int32_t r = 0; r < 16; ++r)
    for (const int32_t hot : {0, 5}) two.place(hot, r);
  const Rounds spread = transfer(two, 60, 1, Mode::kPush);
  CHECK(spread.num_rounds <= 1.1 * most_chunks(spread, 16));
  PlanCase mixed = make_group(8, 8, 2);
  for (int32_t r = 1; r < 8; ++r)
    for (const int32_t hot : {0, 1 + r % 2}) mixed.place(hot, r);
  const Rounds summed = reduction(mixed, 60, 1, Mode::kPull);
  CHECK(summed.num_rounds <= 1.1 * most_chunks(summed, 8));
}

}  // namespace

int main() {
  check_circles();
  check_known();
  Random random(15);
  for (int repeat = 0; repeat < scaled(2000); ++repeat) {
    PlanCase c = draw_case(random, 16);
    const int32_t groups = draw(random, 0, 3) == 0 ? draw(random, 1, 4) : draw(random, 1, 80);
    const int32_t chunk = draw(random, 0, 1) == 0 ? draw(random, 1, 4) : draw(random, 1, groups);
    const bool is_direct = draw(random, 0, 2) == 0;
    check_rounds(reduction(c, groups, chunk, is_direct ? Mode::kDirect : Mode::kPull), c.num_ranks);
    if (repeat % 2 == 1) draw_residents(c, random);
    check_rounds(transfer(c, groups, chunk, is_direct ? Mode::kDirect : Mode::kPush), c.num_ranks);
  }
}
