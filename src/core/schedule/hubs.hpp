// Collected replicas -> which hub hands out which range of an expert's groups, by water-filling.
//
// Run by a team as the functions of schedule.hpp are.
#pragma once

#include "core/base/common.hpp"
#include "core/base/team.hpp"
#include "core/schedule/schedule.hpp"

namespace uec {

namespace detail {

// Hub i of entry x: the source, then the replicas.
UEC_HD inline int32_t hub_rank(const Schedule& s, int32_t x, int32_t hub) {
  return hub == 0 ? s.source[x].rank : s.replica_rank[s.first[x] + hub - 1];
}

// Sorts the experts by descending fan-out, then id, into `order`. Returns how many have several
// replicas; they come first.
template <class Team>
UEC_HD_NOINLINE int32_t sort_experts(Team team, const PlanShape& shape, int32_t* order,
                                     const Schedule& schedule) {
  const Schedule s = schedule;
  const int32_t num_experts = s.num_experts, most = shape.max_fanout;
  int32_t* const place = s.boundary;  // [most] by descending fan-out; free until hubs are assigned
  UEC_ROLLED
  for (int32_t i = team.index(); i < most; i += team.size()) place[i] = 0;
  team.sync();
  UEC_ROLLED
  for (int32_t x = team.index(); x < num_experts; x += team.size())
    team.atomic_add(&place[most - s.num_replicas(x)], 1);
  team.sync();
  const Run own = Run::of(team, most);
  uint32_t count = 0;
  UEC_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) count += static_cast<uint32_t>(place[i]);
  auto at = static_cast<int32_t>(team.exclusive_sum(count));
  UEC_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) {
    const int32_t n = place[i];
    place[i] = at;
    at += n;
  }
  team.sync();
  const int32_t num_shared = place[most - 1];
  UEC_ROLLED
  for (int32_t begin = 0; begin < num_experts; begin += team.size()) {
    const int32_t x = begin + team.index();
    const int32_t i = x < num_experts ? most - s.num_replicas(x) : 0;
    const int32_t nth = team.equal_before(x < num_experts ? static_cast<uint32_t>(i) : ~0u);
    const int32_t to = place[i] + nth;
    team.sync();  // the next ones go behind these
    if (x < num_experts) {
      team.atomic_add(&place[i], 1);
      order[to] = x;
    }
  }
  team.sync();
  return num_shared;
}

// 1 if the first of an entry's hubs, the source, is left out when it is filled: a foreign source
// sends no copy but the first. `domain`: [G]; null: no entry is foreign, or has several replicas.
UEC_HD inline int32_t left_out(const int32_t* domain, const Schedule& s, int32_t x) {
  return domain != nullptr && is_foreign(domain, s, x);
}

// An expert to be filled. A member handles every size()-th of its hubs, from index() on, and caches
// what it knows of the first. Hubs are counted without one that is left out.
struct Filling {
  int32_t last;             // hub
  int32_t copies;           // to be handed out, beyond the one that leaves the source anyway
  int32_t rank;             // of the member's first hub, if there is one
  const int32_t* replicas;  // ranks of hubs 1 to `last`, by hub
  int64_t* extra;           // [last + 1]
};

template <class Team>
UEC_HD Filling filling_of(Team team, const int32_t* domain, const Schedule& s, int32_t x,
                          int64_t* extra) {
  const int32_t skip = left_out(domain, s, x), n = s.num_replicas(x);
  int64_t* const own = extra + s.first[x] + x;
  if (skip > 0 && team.leader()) own[0] = 0;
  const int32_t rank = team.index() + skip <= n ? hub_rank(s, x, team.index() + skip) : -1;
  return {n - skip, n - 1, rank, s.replica_rank + s.first[x] - 1 + skip, own + skip};
}

// Water-filling: the largest level with sum(max(level - egress, 0)) <= total. What is left goes to
// the first hubs at the level, one unit each.
//
// Newton's steps from above: starting from a level that is too high, filling only the hubs below it
// with `total` gives a lower level, but never one below the answer. That holds for any subset of
// the hubs: those that were filled last time are a good guess. Few steps, and no sorting.
//
// `Units` holds the egress of all ranks together.
template <class Units, class Team>
UEC_HD void fill_expert(Team team, const Filling& filling, bool first_time, const Schedule& s) {
  constexpr Units kNoHub = ~Units{0};  // above all levels
  const int32_t last = filling.last;
  const Units total = static_cast<Units>(filling.copies) * static_cast<Units>(kEgressUnit);
  int64_t* const extra = filling.extra;
  int64_t* const egress = extra;  // of further hubs without this expert's extra, until it is known
  Units below = 0, num_below = 0;
  const auto enter = [&](int32_t rank, int32_t hub) {
    const int64_t before = first_time ? 0 : extra[hub];
    const auto others = static_cast<Units>(s.egress[rank] - before);
    const bool guessed = first_time || before > 0;
    below += guessed ? others : 0;
    num_below += guessed;
    return others;
  };
  const Units first = filling.rank < 0 ? kNoHub : enter(filling.rank, team.index());
  UEC_ROLLED
  for (int32_t hub = team.index() + team.size(); hub <= last; hub += team.size())
    egress[hub] = enter(filling.replicas[hub], hub);

  Units level;
  uint64_t filled;
  below = team.sum(below);
  num_below = team.sum(num_below);
  for (;;) {
    level = (total + below) / num_below;
    below = first < level ? first : 0;
    num_below = first < level;
    UEC_ROLLED
    for (int32_t hub = team.index() + team.size(); hub <= last; hub += team.size()) {
      const auto e = static_cast<Units>(egress[hub]);
      below += e < level ? e : 0;
      num_below += e < level;
    }
    below = team.sum(below);
    num_below = team.sum(num_below);
    filled = uint64_t{num_below} * level - below;
    if (filled <= total) break;
  }
  auto left = static_cast<int32_t>(total - filled);
  UEC_ROLLED
  for (int32_t begin = 0; begin <= last; begin += team.size()) {
    const int32_t hub = begin + team.index();
    Units others = first;
    if (begin > 0) others = hub <= last ? static_cast<Units>(egress[hub]) : kNoHub;
    const bool fits = others <= level;
    const MemberCount counted = team.count(fits);
    const int64_t unit = fits && counted.before < left;
    left -= counted.all;
    if (hub > last) continue;
    extra[hub] = (fits ? static_cast<int64_t>(level - others) : 0) + unit;
    const int32_t rank = begin == 0 ? filling.rank : filling.replicas[hub];
    s.egress[rank] = static_cast<int64_t>(others) + extra[hub];
  }
  team.sync();  // the next expert may have the same hubs
}

// A team goes through the experts with several replicas in this way: through the widest one after
// another, and then through all others level by level, a member for each. A level's experts share
// no rank with each other, and come after those before them in the order that do: so they can be
// filled side by side.
inline constexpr int32_t kNarrowHubs = 8;  // of one, at most, with its home

// Together, all ranks send kEgressUnit for every replica: with fewer, that fits 32 bits.
inline constexpr int32_t kNearReplicas = 1 << 16;

UEC_HD inline bool is_wide(int32_t num_replicas) { return num_replicas >= kNarrowHubs; }

// The levels of experts that share ranks, one after another. Returns how many levels there are.
template <class Team>
UEC_HD_NOINLINE int32_t find_levels(Team team, const Topology& topology, int32_t num_shared,
                                    int32_t* last, const ScheduleScratch& arrays,
                                    const Schedule& schedule) {
  const Topology t = topology;
  const ScheduleScratch scratch = arrays;
  const Schedule s = schedule;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) last[r] = 0;
  team.sync();
  int32_t num_levels = 0;
  UEC_ROLLED
  for (int32_t i = 0; i < num_shared; ++i) {
    const int32_t x = scratch.order[i], n = s.num_replicas(x);
    int32_t level = 0;
    UEC_ROLLED
    for (int32_t hub = team.index(); hub <= n; hub += team.size())
      level = max32(level, last[hub_rank(s, x, hub)]);
    level = 1 + static_cast<int32_t>(highest(team, static_cast<uint32_t>(level)));
    UEC_ROLLED
    for (int32_t hub = team.index(); hub <= n; hub += team.size())
      last[hub_rank(s, x, hub)] = level;
    if (team.leader()) scratch.count[x] = level;
    num_levels = max32(num_levels, level);
    team.sync();  // the next expert may have the same ranks
  }
  return num_levels;
}

// The ranks of a narrow expert's hubs, up to `last`, looked up side by side; the last one's stands
// for those that it does not have. `skip`: as left_out() says.
UEC_HD inline void find_ranks(const Schedule& s, int32_t x, int32_t skip, int32_t last,
                              int32_t (&rank)[kNarrowHubs]) {
  const int32_t* const replica = s.replica_rank + s.first[x] - 1 + skip;
  rank[0] = skip > 0 ? replica[0] : s.source[x].rank;
  UEC_UNROLLED
  for (int32_t hub = 1; hub < kNarrowHubs; ++hub) rank[hub] = replica[min32(hub, last)];
}

// Whether any two experts with several replicas share a rank. Rarely, and only then their order
// matters. Notes the wide ones, and that all others are of one level.
template <class Team>
UEC_HD_NOINLINE bool find_meeting(Team team, const Topology& topology, int32_t* met,
                                  const ScheduleScratch& arrays, const Schedule& schedule,
                                  int32_t* num_wide) {
  const Topology t = topology;
  const ScheduleScratch scratch = arrays;
  const Schedule s = schedule;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) met[r] = 0;
  team.sync();
  int32_t wide = 0;
  bool meets = false;
  UEC_ROLLED
  for (int32_t begin = 0; begin < s.num_experts; begin += team.size()) {
    const int32_t x = begin + team.index();
    const int32_t n = x < s.num_experts ? s.num_replicas(x) : 0;
    const MemberCount counted = team.count(is_wide(n));
    if (is_wide(n)) scratch.order[wide + counted.before] = x;
    wide += counted.all;
    if (n > 0) scratch.count[x] = n > 1 && !is_wide(n);
    if (n <= 1 || is_wide(n)) continue;
    int32_t rank[kNarrowHubs], before[kNarrowHubs];
    find_ranks(s, x, 0, n, rank);
    UEC_UNROLLED
    for (int32_t hub = 0; hub < kNarrowHubs; ++hub)
      before[hub] = hub <= n ? team.atomic_add(&met[rank[hub]], 1) : 0;
    UEC_UNROLLED
    for (int32_t hub = 0; hub < kNarrowHubs; ++hub) meets |= before[hub] > 0;
  }
  *num_wide = wide;
  if (team.count(meets).all > 0) return true;  // after this, the wide ones are known
  UEC_ROLLED
  for (int32_t i = 0; i < wide; ++i) {
    const int32_t x = scratch.order[i], n = s.num_replicas(x);
    UEC_ROLLED
    for (int32_t hub = team.index(); hub <= n; hub += team.size())
      meets |= team.atomic_add(&met[hub_rank(s, x, hub)], 1) > 0;
  }
  return team.count(meets).all > 0;
}

// Sets the order. Returns the number of levels; 0: all experts are taken for wide, as by a team of
// one, or none is to be filled.
template <class Team>
UEC_HD int32_t order_experts(Team team, const Topology& t, const PlanShape& shape,
                             const ScheduleScratch& scratch, const Schedule& s, int32_t* num_wide) {
  *num_wide = 0;
  if (shape.max_fanout == 1) return 0;
  if (team.size() == 1 || shape.num_replicas >= kNearReplicas) {
    *num_wide = sort_experts(team, shape, scratch.order, s);
    return 0;
  }
  auto* const of_rank = reinterpret_cast<int32_t*>(scratch.extra);  // [G], free until the filling
  // Assigned: for initial values nvcc tries calls at compile time, and puts `team` into memory.
  bool meets;
  meets = find_meeting(team, t, of_rank, scratch, s, num_wide);
  if (!meets) return 1;
  int32_t num_shared;
  num_shared = sort_experts(team, shape, scratch.order, s);
  return find_levels(team, t, num_shared, of_rank, scratch, s);
}

// Does what fill_expert() does by one member, which keeps the hubs' state in registers.
UEC_HD inline void fill_narrow(int32_t x, const int32_t* domain, bool first_time, int64_t* extra,
                               const Schedule& s) {
  constexpr uint32_t kNoHub = ~0u;
  const int32_t n = s.num_replicas(x), skip = left_out(domain, s, x), last = n - skip;
  const uint32_t total = static_cast<uint32_t>(n - 1) * static_cast<uint32_t>(kEgressUnit);
  int32_t rank[kNarrowHubs];
  int64_t* const egress = s.egress;
  uint32_t others[kNarrowHubs], below = 0, level;
  find_ranks(s, x, skip, last, rank);
  if (skip > 0) *extra++ = 0;
  UEC_UNROLLED
  for (int32_t hub = 0; hub < kNarrowHubs; ++hub)
    others[hub] = static_cast<uint32_t>(egress[rank[hub]]);
  if (!first_time) {
    UEC_UNROLLED
    for (int32_t hub = 0; hub < kNarrowHubs; ++hub)
      others[hub] -= static_cast<uint32_t>(extra[min32(hub, last)]);
  }
  UEC_UNROLLED
  for (int32_t hub = 0; hub < kNarrowHubs; ++hub) {
    below += hub <= last ? others[hub] : 0;
    others[hub] = hub <= last ? others[hub] : kNoHub;
  }
  uint64_t filled;
  for (uint32_t num_below = static_cast<uint32_t>(last) + 1;;) {
    level = (total + below) / num_below;
    below = num_below = 0;
    UEC_UNROLLED
    for (int32_t hub = 0; hub < kNarrowHubs; ++hub) {
      below += others[hub] < level ? others[hub] : 0;
      num_below += others[hub] < level;
    }
    filled = uint64_t{num_below} * level - below;
    if (filled <= total) break;
  }
  auto left = static_cast<int32_t>(total - filled);
  UEC_UNROLLED
  for (int32_t hub = 0; hub < kNarrowHubs; ++hub) {
    const bool fits = others[hub] <= level;
    const uint32_t added = (fits ? level - others[hub] : 0) + (fits && left > 0);
    left -= fits;
    if (hub > last) continue;
    extra[hub] = static_cast<int64_t>(added);
    egress[rank[hub]] = static_cast<int64_t>(others[hub] + added);
  }
}

template <class Team>
UEC_HD_NOINLINE void fill_level(Team team, const int32_t* domain, int32_t level, bool first_time,
                                const ScheduleScratch& scratch, const Schedule& s) {
  UEC_ROLLED
  for (int32_t x = team.index(); x < s.num_experts; x += team.size())
    if (scratch.count[x] == level && !is_wide(s.num_replicas(x)))
      fill_narrow(x, domain, first_time, scratch.extra + s.first[x] + x, s);
  team.sync();  // the next level may have the same hubs
}

// Kept out of line, or a host's compiler would not inline what every schedule needs.
template <class Units, class Team>
[[gnu::noinline]] UEC_HD_NOINLINE void fill_wide(Team team, const int32_t* domain, int32_t num_wide,
                                                 bool first_time, const ScheduleScratch& arrays,
                                                 const Schedule& schedule) {
  const ScheduleScratch scratch = arrays;
  const Schedule s = schedule;
  UEC_ROLLED
  for (int32_t i = 0; i < num_wide; ++i) {
    const Filling filling = filling_of(team, domain, s, scratch.order[i], scratch.extra);
    fill_expert<Units>(team, filling, first_time, s);
  }
}

template <class Units, class Team>
UEC_HD void fill_experts(Team team, const int32_t* domain, int32_t passes, int32_t num_wide,
                         int32_t num_levels, const ScheduleScratch& scratch, const Schedule& s) {
  UEC_ROLLED
  for (int32_t pass = 0; pass < passes; ++pass) {
    if (num_wide > 0) fill_wide<Units>(team, domain, num_wide, pass == 0, scratch, s);
    UEC_ROLLED
    for (int32_t level = 1; team.size() > 1 && level <= num_levels; ++level)
      fill_level(team, domain, level, pass == 0, scratch, s);
  }
}

// Below this, a narrow expert's divisions take 32 bits.
inline constexpr int32_t kNearGroups = 1 << 28;

// The hubs' ranges, from what each adds to its rank: up to the group nearest to
// sum * groups / ((n - 1) * kEgressUnit), where `sum` is of the hubs up to one; a half goes up.
template <class Team>
UEC_HD_NOINLINE void set_boundaries(Team team, int32_t num_groups, int32_t num_wide,
                                    const ScheduleScratch& arrays, const Schedule& schedule) {
  const ScheduleScratch scratch = arrays;
  Schedule s = schedule;
  const auto dividend = [&](auto sum, int32_t n) {
    const uint64_t halves = static_cast<uint64_t>(sum) * static_cast<uint32_t>(num_groups);
    const auto whole = static_cast<decltype(sum)>(halves / (kEgressUnit / 2));
    return (whole + static_cast<uint32_t>(n - 1)) / 2;
  };
  UEC_ROLLED
  for (int32_t x = team.index(); x < s.num_experts; x += team.size()) {
    const int32_t n = s.num_replicas(x);
    int32_t* const bounds = s.boundaries(x);
    bounds[0] = 0;
    if (n == 1) bounds[1] = bounds[2] = num_groups;  // everything is left to the home
    if (n == 1 || (team.size() > 1 && is_wide(n))) continue;
    const int64_t* const extra = scratch.extra + s.first[x] + x;
    const Divider by_others(static_cast<uint32_t>(n - 1));
    if (team.size() == 1 || num_groups >= kNearGroups) {
      uint64_t sum = 0;
      for (int32_t hub = 0; hub <= n; ++hub) {
        sum += static_cast<uint64_t>(extra[hub]);
        bounds[hub + 1] = static_cast<int32_t>(by_others(dividend(sum, n)));
      }
      continue;
    }
    uint32_t sum = 0;
    UEC_UNROLLED
    for (int32_t hub = 0; hub < kNarrowHubs; ++hub) {
      if (hub > n) continue;
      sum += static_cast<uint32_t>(extra[hub]);
      bounds[hub + 1] =
          static_cast<int32_t>(by_others.near(static_cast<uint32_t>(dividend(sum, n))));
    }
  }
  UEC_ROLLED
  for (int32_t i = 0; team.size() > 1 && i < num_wide; ++i) {  // a member for each hub
    const int32_t x = scratch.order[i], n = s.num_replicas(x);
    if (!is_wide(n)) break;
    const int64_t* const extra = scratch.extra + s.first[x] + x;
    const Divider by_others(static_cast<uint32_t>(n - 1));
    uint64_t before = 0;
    UEC_ROLLED
    for (int32_t begin = 0; begin <= n; begin += team.size()) {
      const int32_t hub = begin + team.index();
      const uint64_t own = hub <= n ? static_cast<uint64_t>(extra[hub]) : 0;
      const uint64_t sum = before + team.exclusive_sum(own) + own;
      if (hub <= n) s.boundaries(x)[hub + 1] = static_cast<int32_t>(by_others(dividend(sum, n)));
      before = team.read_from(team.size() - 1, sum);
    }
  }
  team.sync();  // all boundaries are there
}

template <class Team>
UEC_HD void assign_homes(Team team, const Topology& t, int32_t num_groups, Schedule& s) {
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) s.egress[r] = 0;
  team.sync();
  UEC_ROLLED
  for (int32_t x = team.index(); x < s.num_experts; x += team.size()) {
    const int32_t n = s.num_replicas(x);
    int32_t* const bounds = s.boundaries(x);
    bounds[0] = 0;
    for (int32_t hub = 1; hub <= n + 1; ++hub) bounds[hub] = num_groups;
    team.atomic_add(&s.egress[s.source[x].rank], n * kEgressUnit);
  }
  team.sync();
}

}  // namespace detail

// Fills `boundary` and `egress` of a schedule whose replicas have been collected with this scratch.
template <class Team>
UEC_HD_NOINLINE void assign_hubs(Team team, const Topology& t, int32_t num_groups,
                                 const PlanShape& shape, Mode mode, const ScheduleScratch& scratch,
                                 Schedule& schedule) {
  if (team.leader()) schedule.mode = mode;
  if (mode == Mode::kDirect) return detail::assign_homes(team, t, num_groups, schedule);
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size())
    schedule.egress[r] = scratch.exports[r] * kEgressUnit;
  team.sync();
  if (shape.num_replicas == 0) return;
  // Descending fan-out, then id: widely replicated experts have the most freedom, and the most
  // bytes to place.
  int32_t num_wide, num_levels;
  num_levels = detail::order_experts(team, t, shape, scratch, schedule, &num_wide);
  // Where none of them share a rank, a second pass would change nothing.
  int32_t passes = shape.chained ? 4 : 2;
  if (num_levels == 1) passes = 1;
  const int32_t* const domain = shape.relays ? t.domain : nullptr;
  if (shape.num_replicas < detail::kNearReplicas)
    detail::fill_experts<uint32_t>(team, domain, passes, num_wide, num_levels, scratch, schedule);
  else
    detail::fill_experts<uint64_t>(team, domain, passes, num_wide, num_levels, scratch, schedule);
  detail::set_boundaries(team, num_groups, num_wide, scratch, schedule);
}

}  // namespace uec
