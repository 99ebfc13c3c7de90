// Schedule -> what one rank does: pieces to stream, senders to expect, ranks to open for.
#pragma once

#include "core/base/common.hpp"
#include "core/base/team.hpp"
#include "core/schedule/schedule.hpp"

namespace uec {

enum class Source : int32_t {
  kHeld,    // what this rank holds: main weights, or a slot complete since an earlier call
  kSlot,    // this rank's slot, as its tiles become ready (a hub in push)
  kRemote,  // what the source holds, by remote load (a hub in pull)
};

struct Destination {
  int32_t rank;
  int32_t slot;
};

// Everything this rank sends of one entry of the schedule: groups in a row. When the last of them
// has been delivered, `done` is published to each destination in [done_first, done_first +
// done_count).
struct Task {
  int32_t expert;
  int32_t num_groups;  // over all pieces
  int32_t done_first;  // into destinations
  int32_t done_count;
  int32_t pulled_rank;  // pull hub: the source, which learns that it was read; else -1
  int32_t pulled_idx;   // and where, as source_idx()
};

// A run of groups of one task with one source and one set of destinations.
struct Piece {
  int32_t task;
  int32_t begin, end;  // groups
  Source source;
  int32_t source_rank;  // the expert's source; kSlot: whose flags we wait for
  int32_t source_idx;   // as source_idx()
  int32_t dst_first;    // into destinations
  int32_t dst_count;
  bool sets_ready;  // push, source -> hub: flag each group at the hub
};

// A flag this rank waits for before its call is finished.
struct Expected {
  enum Kind : int32_t { kDone, kPulled, kConsumed } kind;
  int32_t peer;
  int32_t expert;
  int32_t idx;  // slot; kPulled: where this rank was read, as source_idx()
};

// A run of groups of one expert's gradients, and what this rank does with them.
struct Reduction {
  enum Kind : int32_t {
    kSum,   // a hub: adds up all replicas, in its own memory
    kAdd,   // the home: adds the sum to the main gradient
    kZero,  // the owner of a slot: clears it, after its readers are done
  } kind;
  int32_t expert;
  int32_t idx;              // this rank's slot; kAdd: the expert's local_idx
  int32_t home, local_idx;  // kSum: where each sum is published, and the expert's index there
  bool of_hub;              // kAdd: of one hub's sums; else of the replicas themselves
  // kSum, kAdd: the slots that are read, by ascending rank: indices into destinations. kZero: the
  // flags that have to arrive before: indices into expected.
  int32_t first, count;
  int32_t begin = 0, end = 0;      // groups, numbered as their flags are
  int32_t tile = 0, end_tile = 0;  // their tiles
  int32_t group_tiles = 0;         // tiles in each, except the last
};

// Capacities, with R replicas in the plan and M local experts on this rank: tasks M + S, pieces M +
// R + S, reductions M + R + 2 S, destinations and expected R + S * G. Where plans may cross D
// domains, tasks are at most (M + S) * D, and at most the larger of M + S and G * S.
struct Worklist {
  int32_t num_tasks = 0, num_pieces = 0, num_destinations = 0, num_expected = 0;
  Task* tasks = nullptr;
  Piece* pieces = nullptr;
  Destination* destinations = nullptr;
  Expected* expected = nullptr;
  uint8_t* opens =
      nullptr;  // [G] 1: may write or read our slots or read our main weights in this call
  uint8_t* involved = nullptr;  // [G] 1: sends or receives something under the plan
  uint8_t* needs = nullptr;     // [G] 1: has to open for us: we write or read what it has, or flag
  // For a gradient reduction, which has neither tasks nor pieces.
  int32_t num_reductions = 0;
  Reduction* reductions = nullptr;
};

// Where an expert lies on a rank, as one number: the index among its local experts, or the
// complement of a slot.
UEC_HD constexpr int32_t source_idx(int32_t slot, int32_t local_idx) {
  return slot == kMainSlot ? local_idx : ~slot;
}

namespace detail {

// The counts are the same in every member; what it writes is shared. Experts are added one after
// another, the hubs of each in parallel.
template <class Team>
struct WorklistBuilder {
  Team team;
  const Schedule& s;
  int32_t rank;
  const Worklist& w;
  int32_t num_tasks = 0, num_pieces = 0, num_destinations = 0, num_expected = 0;

  UEC_HD void put_destination(int32_t at, int32_t i) const {
    w.destinations[at] = {s.replica_rank[i], s.replica_slot[i]};
    if (s.replica_rank[i] != rank) team.set(&w.needs[s.replica_rank[i]]);
  }

  // Adds all replicas of x except the one at index `skip`, starting behind it: hubs that forward at
  // the same time would otherwise all store to the same rank first.
  UEC_HD void add_destinations(int32_t x, int32_t skip) {
    const int32_t first = s.first[x], end = s.first[x + 1];
    const bool skips = skip >= first;
    const int32_t begin = skips ? skip + 1 : first, wrapped = end - begin;
    UEC_ROLLED
    for (int32_t i = first + team.index(); i < end; i += team.size())
      if (i != skip)
        put_destination(num_destinations + (i >= begin ? i - begin : wrapped + i - first), i);
    num_destinations += end - first - skips;
  }

  UEC_HD void put_expected(int32_t at, Expected::Kind kind, int32_t peer, int32_t expert,
                           int32_t idx) const {
    w.expected[at] = {kind, peer, expert, idx};
    team.set(&w.opens[peer]);
  }

  // Expects a flag of each replica of x that is a hub, except the one at index `skip`.
  UEC_HD void expect_hubs(Expected::Kind kind, int32_t x, int32_t skip, int32_t idx) {
    const int32_t* const bounds = s.boundaries(x) + 1 - s.first[x];  // of the replica at an index
    const int32_t end = s.first[x + 1];
    UEC_ROLLED
    for (int32_t begin = s.first[x]; begin < end; begin += team.size()) {
      const int32_t i = begin + team.index();
      const bool sends = i < end && i != skip && bounds[i + 1] > bounds[i];
      const MemberCount counted = team.count(sends);
      if (sends)
        put_expected(num_expected + counted.before, kind, s.replica_rank[i], s.expert[x], idx);
      num_expected += counted.all;
    }
  }

  // One member adds these.
  UEC_HD void add_task(const Task& task) {
    if (team.leader()) w.tasks[num_tasks] = task;
    ++num_tasks;
  }
  UEC_HD void add_piece(const Piece& piece) {
    if (team.leader()) w.pieces[num_pieces] = piece;
    ++num_pieces;
  }

  // This rank is the source of x. `held`: as source_idx().
  UEC_HD void add_source(int32_t x, int32_t held) {
    const int32_t* bounds = s.boundaries(x);
    const int32_t n = s.num_replicas(x);
    const bool to_all = bounds[1] > bounds[0], pushes = s.mode == Mode::kPush;
    if (s.mode == Mode::kPull) {
      expect_hubs(Expected::kPulled, x, -1, held);
      if (!to_all) return;
    }
    const int32_t all = num_destinations;
    if (to_all) add_destinations(x, -1);
    if (pushes) {  // ahead of the source's own range: at equal progress, hubs are fed first
      UEC_ROLLED
      for (int32_t begin = 1; begin <= n; begin += team.size()) {
        const int32_t hub = begin + team.index();
        const bool is_hub = hub <= n && bounds[hub + 1] > bounds[hub];
        const MemberCount counted = team.count(is_hub);
        if (is_hub) {
          const int32_t to = to_all ? all + hub - 1 : num_destinations + counted.before;
          if (!to_all) put_destination(to, s.first[x] + hub - 1);
          w.pieces[num_pieces + counted.before] = {
              num_tasks, bounds[hub], bounds[hub + 1], Source::kHeld, rank, held, to, 1, true};
        }
        num_pieces += counted.all;
        if (!to_all) num_destinations += counted.all;
      }
    }
    if (to_all)
      add_piece({num_tasks, bounds[0], bounds[1], Source::kHeld, rank, held, all, n, false});
    // Written to: all replicas if the source is a hub itself, else the hubs.
    add_task({s.expert[x], pushes ? bounds[n + 1] : bounds[1] - bounds[0], all,
              num_destinations - all, -1, -1});
  }

  // The replica at index `self` is this rank's. `held`: at the source, as source_idx().
  UEC_HD void add_replica(int32_t x, int32_t self, int32_t held) {
    const int32_t* bounds = s.boundaries(x);
    const int32_t n = s.num_replicas(x), expert = s.expert[x], from = s.source[x].rank;
    const int32_t own = self - s.first[x] + 1, slot = s.replica_slot[self];
    const int32_t begin = bounds[own], end = bounds[own + 1];
    const bool is_hub = end > begin;
    if (bounds[1] > bounds[0] || (s.mode == Mode::kPush && is_hub)) {
      if (team.leader()) put_expected(num_expected, Expected::kDone, from, expert, slot);
      ++num_expected;
    }
    expect_hubs(Expected::kDone, x, self, slot);
    if (!is_hub) return;

    const int32_t first = num_destinations;
    add_destinations(x, self);
    if (s.mode == Mode::kPull) {
      // This rank comes last: `done` goes to other ranks only.
      if (team.leader()) {
        put_destination(num_destinations, self);
        team.set(&w.needs[from]);
      }
      ++num_destinations;
      add_piece({num_tasks, begin, end, Source::kRemote, from, held, first, n, false});
      add_task({expert, end - begin, first, n - 1, from, held});
    } else {
      add_piece({num_tasks, begin, end, Source::kSlot, from, ~slot, first, n - 1, false});
      add_task({expert, end - begin, first, n - 1, -1, -1});
    }
  }
};

// Calls of_source(x) for each entry of the schedule whose source is `rank`, and of_replica(x, i)
// for its replica at index i there: by ascending entry.
template <class Team, class OfSource, class OfReplica>
UEC_HD void visit_experts(Team team, const Schedule& s, int32_t rank, OfSource&& of_source,
                          OfReplica&& of_replica) {
  const int32_t num_experts = s.num_experts, num_replicas = s.first[num_experts];
  const auto next_source = [&](int32_t from) {
    return find_first(team, from, num_experts, [&](int32_t x) { return s.source[x].rank == rank; });
  };
  const auto next_replica = [&](int32_t from) {
    return find_first(team, from, num_replicas,
                      [&](int32_t i) { return s.replica_rank[i] == rank; });
  };
  int32_t source = next_source(0);
  for (int32_t from = 0; from < num_replicas;) {
    const int32_t i = next_replica(from);
    const int32_t x =
        i == num_replicas
            ? num_experts
            : bisect_first(team, 0, num_experts, [&](int32_t y) { return s.first[y + 1] > i; });
    for (; source < x; source = next_source(source + 1)) of_source(source);
    if (i < num_replicas) of_replica(x, i);
    from = i + 1;
  }
}

// Notes which ranks send or receive something under the plan, and that none is needed yet.
template <class Team>
UEC_HD void note_involved(Team team, const Topology& t, const Schedule& s, const Worklist& w) {
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size())
    w.opens[r] = w.involved[r] = w.needs[r] = 0;
  team.sync();
  UEC_ROLLED
  for (int32_t x = team.index(); x < s.num_experts; x += team.size())
    team.set(&w.involved[s.source[x].rank]);
  UEC_ROLLED
  for (int32_t i = team.index(); i < s.first[s.num_experts]; i += team.size())
    team.set(&w.involved[s.replica_rank[i]]);
}

}  // namespace detail

// `local_idx` [E]: index of each expert among its home's local experts.
//
// Run by a team as the functions of schedule.hpp are: the leader writes the counts.
template <class Team>
UEC_HD_NOINLINE void build_worklist(Team team, const Topology& t, const Schedule& schedule,
                                    const int32_t* local_idx, int32_t rank, Worklist& w) {
  const Schedule s = schedule;
  detail::note_involved(team, t, s, w);
  detail::WorklistBuilder<Team> build{team, s, rank, w};
  const auto held = [&](int32_t x) { return source_idx(s.source[x].slot, local_idx[s.expert[x]]); };
  detail::visit_experts(
      team, s, rank, [&](int32_t x) { build.add_source(x, held(x)); },
      [&](int32_t x, int32_t i) { build.add_replica(x, i, held(x)); });
  if (team.leader()) {
    w.num_tasks = build.num_tasks;
    w.num_pieces = build.num_pieces;
    w.num_destinations = build.num_destinations;
    w.num_expected = build.num_expected;
    w.num_reductions = 0;
  }
  team.sync();
}

}  // namespace uec
