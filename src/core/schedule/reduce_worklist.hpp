// The schedule of a gradient reduction -> what one rank does.
#pragma once

#include "core/schedule/tiles.hpp"
#include "core/schedule/worklist.hpp"

namespace uec {

namespace detail {

// Works as WorklistBuilder: every member has the same counts; what it writes is shared.
template <class Team>
struct ReductionBuilder {
  Team team;
  const TileMap& tiles;
  const Schedule& s;
  int32_t rank;
  bool zero;
  const Worklist& w;
  int32_t num_reductions = 0, num_sources = 0, num_expected = 0;

  UEC_HD void put_source(int32_t at, int32_t i) const {
    w.destinations[at] = {s.replica_rank[i], s.replica_slot[i]};
    if (s.replica_rank[i] != rank) team.set(&w.needs[s.replica_rank[i]]);
  }

  // Lists all replicas of x by ascending rank: the order in which they are added.
  UEC_HD void add_sources(int32_t x) {
    const int32_t first = s.first[x], end = s.first[x + 1];
    UEC_ROLLED
    for (int32_t i = first + team.index(); i < end; i += team.size())
      put_source(num_sources + i - first, i);
    num_sources += end - first;
  }

  UEC_HD void add(const Reduction& reduction) {
    if (team.leader()) w.reductions[num_reductions] = reduction;
    ++num_reductions;
  }

  // Cuts into groups the range of hub `range`, or (0) the whole expert, whose groups have no flags.
  // A group costs who directs the same whatever its size, so large experts have larger ones.
  UEC_HD void cut(int32_t x, int32_t range, Reduction* r) const {
    const int32_t n = s.num_replicas(x);
    const int32_t* const bounds = s.boundaries(x);
    const int32_t unit = tiles.group_tiles;
    const auto all = static_cast<int32_t>(tiles.num_tiles());
    if (range == 0) {
      r->group_tiles = max32(unit, quotient(all + kReduceGroups - 1, kReduceGroups));
      r->begin = r->tile = 0;
      r->end_tile = all;
    } else {
      const int32_t units = max32(1, min32(kMostUnits, quotient(bounds[n + 1], n * kReduceGroups)));
      r->group_tiles = units * unit;
      // Hubs' groups have flags of their own: a range has at most one more than its share.
      r->begin = units == 1 ? bounds[range] : quotient(bounds[range], units) + range - 1;
      r->tile = bounds[range] * unit;
      r->end_tile = min32(bounds[range + 1] * unit, all);
    }
    r->end = r->begin + quotient(r->end_tile - r->tile + r->group_tiles - 1, r->group_tiles);
  }
  UEC_HD static int32_t quotient(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  }

  UEC_HD_NOINLINE void add_home(int32_t x, int32_t local_idx) {
    const int32_t* const bounds = s.boundaries(x);
    const int32_t n = s.num_replicas(x);
    Reduction all = {Reduction::kAdd, s.expert[x], local_idx,   rank,
                     local_idx,       false,       num_sources, n};
    if (bounds[1] > bounds[0]) {
      cut(x, 0, &all);
      add(all);
      add_sources(x);
    }
    UEC_ROLLED
    for (int32_t begin = 1; begin <= n; begin += team.size()) {
      const int32_t hub = begin + team.index();
      const bool is_hub = hub <= n && bounds[hub + 1] > bounds[hub];
      const MemberCount counted = team.count(is_hub);
      if (is_hub) {
        const int32_t i = s.first[x] + hub - 1, to = num_sources + counted.before;
        put_source(to, i);
        team.set(&w.opens[s.replica_rank[i]]);  // it flags its sums here
        Reduction one = all;
        cut(x, hub, &one);
        one.of_hub = true;
        one.first = to;
        one.count = 1;
        w.reductions[num_reductions + counted.before] = one;
      }
      num_reductions += counted.all;
      num_sources += counted.all;
    }
  }

  UEC_HD void put_expected(int32_t at, int32_t peer, int32_t expert, int32_t slot) const {
    w.expected[at] = {Expected::kConsumed, peer, expert, slot};
    team.set(&w.opens[peer]);
  }

  // The replica at index `self` is this rank's.
  UEC_HD_NOINLINE void add_replica(int32_t x, int32_t self, int32_t local_idx) {
    const int32_t* const bounds = s.boundaries(x);
    const int32_t n = s.num_replicas(x), expert = s.expert[x], home = s.source[x].rank;
    const int32_t own = self - s.first[x] + 1, slot = s.replica_slot[self];
    const int32_t begin = bounds[own], end = bounds[own + 1], first_reader = num_expected;
    if (end > begin) {
      if (team.leader()) team.set(&w.needs[home]);
      Reduction sum = {Reduction::kSum, expert, slot, home, local_idx, false, num_sources, n};
      cut(x, own, &sum);
      add(sum);
      add_sources(x);
    }
    // All readers of this slot: the home, for its own range or for ours, and the other hubs.
    if (end > begin || bounds[1] > bounds[0]) {
      if (team.leader()) put_expected(num_expected, home, expert, slot);
      ++num_expected;
    }
    UEC_ROLLED
    for (int32_t begins = 1; begins <= n; begins += team.size()) {
      const int32_t hub = begins + team.index();
      const bool reads = hub <= n && hub != own && bounds[hub + 1] > bounds[hub];
      const MemberCount counted = team.count(reads);
      if (reads)
        put_expected(num_expected + counted.before, s.replica_rank[s.first[x] + hub - 1], expert,
                     slot);
      num_expected += counted.all;
    }
    if (!zero) return;
    Reduction clear = {Reduction::kZero, expert, slot,         home,
                       local_idx,        false,  first_reader, num_expected - first_reader};
    cut(x, 0, &clear);
    add(clear);
  }
};

}  // namespace detail

// Builds what build_worklist() builds for a transfer. `zero`: slots are cleared once they have been
// read.
template <class Team>
UEC_HD_NOINLINE void build_reductions(Team team, const Topology& t, const TileMap& tiles,
                                      const Schedule& s, const int32_t* local_idx, int32_t rank,
                                      bool zero, Worklist& w) {
  detail::note_involved(team, t, s, w);
  detail::ReductionBuilder<Team> build{team, tiles, s, rank, zero, w};
  detail::visit_experts(
      team, s, rank, [&](int32_t x) { build.add_home(x, local_idx[s.expert[x]]); },
      [&](int32_t x, int32_t i) { build.add_replica(x, i, local_idx[s.expert[x]]); });
  if (team.leader()) {
    w.num_tasks = w.num_pieces = 0;
    w.num_reductions = build.num_reductions;
    w.num_destinations = build.num_sources;
    w.num_expected = build.num_expected;
  }
  team.sync();
}

}  // namespace uec
