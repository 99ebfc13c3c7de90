// Plan -> schedule: for each replicated expert its hubs and the range of flag groups each hands
// out.
//
// A hub (the source or a replica) gives its range to every replica of the expert. The source is the
// home, or a rank one of whose slots holds the expert since an earlier call: a resident. Splitting
// an expert's groups over hubs by water-filling on the ranks' egress brings the busiest link close
// to the bound of any schedule: each replicated expert leaves its source once and each slot is
// filled once. All integers, so that every rank computes the same bytes.
//
// Where plans may cross domains, whose links are slower than those inside, an expert crosses once
// for each domain that needs it, and is handed on inside. An entry of the schedule is then an
// expert and one of the domains that its replicas lie in, and an expert may have several. The
// source is in that domain if anyone there holds the expert. Otherwise the entry is foreign: with
// several replicas these alone are hubs, and the source sends each range once, to its hub. Only if
// sources are to do all the work (kDirect) do they send a foreign entry once for every replica.
//
// A team (team.hpp) of any size computes it, with the same result. The members share what is
// written: the arrays, and the Schedule itself, whose scalars the leader writes. The members have
// synchronised before each of these functions, and synchronise at its end. All members get the same
// return value. Where arrays lie is copied first: a device would load it again after each store.
#pragma once

#include "core/base/common.hpp"
#include "core/base/team.hpp"

namespace uec {

enum class Mode : int32_t { kPush = 0, kPull = 1, kDirect = 2 };
inline constexpr int32_t kNumModes = 3;

// One expert's bytes, in the fixed-point unit of egress.
inline constexpr int64_t kEgressUnit = 1 << 16;

// Which of a plan's filled slots a call takes. Null: all.
struct SlotsToFill {
  static constexpr bool kByDomain = true;  // see collect_entries()
  // [G][S] what slots hold since earlier calls, -1: nothing. A slot that already holds what the
  // plan has there is left out, and may be a source.
  const int32_t* resident = nullptr;
  UEC_HD bool takes(int32_t at, int32_t expert) const {
    return resident == nullptr || resident[at] != expert;
  }
};
struct SlotsWithTokens {
  static constexpr bool kByDomain = false;
  static constexpr const int32_t* resident = nullptr;
  const int32_t* quota = nullptr;  // [G][S]
  UEC_HD bool takes(int32_t at, int32_t) const { return quota == nullptr || quota[at] != 0; }
};

// Where an expert is sent from: a rank's slot that holds it or, of its home, kMainSlot.
inline constexpr int32_t kMainSlot = -1;
struct Sender {
  int32_t rank;
  int32_t slot;
};

// Capacities: R = num_ranks * slots_per_rank replicas, X = min(num_experts, R) entries; where plans
// may cross D domains, X = min(num_experts * D, R). Replicas of an entry stand in ascending rank
// order; its hubs are the source and then the replicas, and hub i owns groups [boundary[i],
// boundary[i + 1]) counted from boundaries(x).
struct Schedule {
  Mode mode = Mode::kDirect;
  int32_t num_experts = 0;          // X: entries, by ascending id of the expert, then by domain
  int32_t* expert = nullptr;        // [X]
  int32_t* first = nullptr;         // [X + 1] into replica_rank and replica_slot
  int32_t* replica_rank = nullptr;  // [R]
  int32_t* replica_slot = nullptr;  // [R]
  int32_t* boundary = nullptr;      // [R + 2X]
  int64_t* egress = nullptr;        // [G] sent, in kEgressUnit per expert, before rounding
  Sender* source = nullptr;         // [X]

  UEC_HD int32_t num_replicas(int32_t x) const { return first[x + 1] - first[x]; }
  UEC_HD int32_t* boundaries(int32_t x) { return boundary + first[x] + 2 * x; }
  UEC_HD const int32_t* boundaries(int32_t x) const { return boundary + first[x] + 2 * x; }
};

// What the shape of a plan costs, before any mode is chosen. Counts are in experts, once for each
// of their entries.
struct PlanShape {
  int32_t num_replicas = 0;
  int32_t max_exports = 0;  // max over ranks of entries sent from there
  int32_t max_imports = 0;  // max over ranks of slots to fill
  int32_t max_fanout = 0;   // max over entries of replicas
  bool chained = false;     // some rank both exports and imports
  bool relays = false;      // some foreign entry has several replicas
};

struct ScheduleScratch {
  int32_t* count = nullptr;    // [max(E, X) + 1]; from the filling on, by entry: its level
  int32_t* exports = nullptr;  // [G] entries sent from there
  int32_t* order = nullptr;    // [X] entries by descending replicas, then as they stand
  int64_t* extra = nullptr;    // [R + X] egress a hub adds to its rank, per entry and hub
};

namespace detail {

// The domain that an entry's replicas lie in.
UEC_HD inline int32_t domain_of(const int32_t* domain, const Schedule& s, int32_t x) {
  return domain[s.replica_rank[s.first[x]]];
}
// Whether its source lies in another one.
UEC_HD inline bool is_foreign(const int32_t* domain, const Schedule& s, int32_t x) {
  return domain[s.source[x].rank] != domain_of(domain, s, x);
}

// Has collected experts sent from slots that hold them where that takes load off other ranks.
//
// A rank's load is 2 for each expert that it sends, and 1 for each of its slots that is filled with
// an expert of several replicas, whose hub it may be. Twice, by ascending id, an expert goes to
// another holder, the one with the least load, if that is at most its source's without it: to the
// home before slots, and to the first of these. Steps sideways, and a second pass, let one expert
// make room for another. Returns the most that a rank sends.
//
// `kSplit`: these are entries, split by domain. If any holders lie in an entry's domain, the others
// are none; and if the home is not among them, the first step is taken whatever their load.
template <bool kSplit, class Team>
UEC_HD_NOINLINE int32_t choose_sources(Team team, const Topology& topology,
                                       const int32_t* slot_expert, const int32_t* resident,
                                       int32_t num_experts, const ScheduleScratch& arrays,
                                       const Schedule& schedule) {
  constexpr uint32_t kNone = ~0u;
  const Topology t = topology;
  const ScheduleScratch scratch = arrays;
  const Schedule s = schedule;
  const int32_t slots = t.slots_per_rank, num_slots = t.num_ranks * slots;
  auto* const is_held = reinterpret_cast<uint8_t*>(scratch.order);  // [X] both are free until hubs
  auto* const load = reinterpret_cast<int32_t*>(s.egress);          // [G] are assigned
  uint8_t* const is_near = is_held + num_experts;                   // [X] by a slot in the domain
  team.sync();                                                      // exports are counted
  UEC_ROLLED
  for (int32_t x = team.index(); x < num_experts; x += team.size()) {
    is_held[x] = 0;
    if constexpr (kSplit) is_near[x] = 0;
  }
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size())
    load[r] = 2 * scratch.exports[r];
  team.sync();
  // Rule: a slot that the call writes to is no source, though it still holds its old expert.
  const auto keeps = [&](int32_t at) {
    return resident[at] >= 0 && resident[at] == slot_expert[at];
  };
  const auto find = [&](int32_t expert) {  // among those collected; -1: it is not
    const int32_t x = bisect_first(SingleThread{}, 0, num_experts,
                                   [&](int32_t y) { return s.expert[y] >= expert; });
    return x < num_experts && s.expert[x] == expert ? x : -1;
  };
  UEC_ROLLED
  for (int32_t at = team.index(); at < num_slots; at += team.size()) {
    int32_t x = find(slot_expert[at]);
    if (x < 0) continue;
    if constexpr (kSplit) {
      const int32_t e = slot_expert[at], domain = t.domain[at / slots];
      UEC_ROLLED
      for (int32_t y = x; keeps(at) && y < num_experts && s.expert[y] == e; ++y) {
        team.set(&is_held[y]);
        if (domain_of(t.domain, s, y) == domain) team.set(&is_near[y]);
      }
      if (keeps(at)) continue;
      while (domain_of(t.domain, s, x) != domain) ++x;
    }
    if (keeps(at))
      team.set(&is_held[x]);
    else if (s.num_replicas(x) > 1)
      team.atomic_add(&load[at / slots], 1);
  }
  team.sync();
  UEC_ROLLED
  for (int32_t i = 0; i < 2 * num_experts; ++i) {
    const int32_t x = i < num_experts ? i : i - num_experts;
    if (!is_held[x]) continue;
    const int32_t e = s.expert[x], home = t.home[e], source = s.source[x].rank;
    int32_t domain = 0;
    bool is_native = false;  // it has holders in its domain, and no others
    bool may_stay = true;    // with its source
    if constexpr (kSplit) {
      domain = domain_of(t.domain, s, x);
      is_native = is_near[x] != 0 || t.domain[home] == domain;
      may_stay = !is_native || t.domain[source] == domain;
    }
    const auto is_far = [&](int32_t rank) {
      return kSplit && is_native && t.domain[rank] != domain;
    };
    auto least = kNone, first = kNone;  // 0: the home, and behind it the slots
    if (home != source && !is_far(home)) {
      least = static_cast<uint32_t>(load[home]);
      first = 0;
    }
    UEC_ROLLED
    for (int32_t at = team.index(); at < num_slots; at += team.size()) {
      const int32_t rank = at / slots;
      if (resident[at] != e || !keeps(at) || rank == source || is_far(rank)) continue;
      const auto own = static_cast<uint32_t>(load[rank]);
      if (own >= least) continue;
      least = own;
      first = static_cast<uint32_t>(at) + 1;
    }
    const uint32_t lowest = team.min_sync(least);
    first = team.min_sync(least == lowest ? first : kNone);
    if (team.leader() && lowest != kNone &&
        (!may_stay || static_cast<int32_t>(lowest) <= load[source] - 2)) {
      const auto at = static_cast<int32_t>(first) - 1;
      const int32_t rank = first == 0 ? home : at / slots;
      s.source[x] = {rank, first == 0 ? kMainSlot : at - rank * slots};
      load[source] -= 2;
      load[rank] += 2;
      --scratch.exports[source];
      ++scratch.exports[rank];
    }
    team.sync();  // the next one counts it
  }
  int32_t most = 0;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size())
    most = max32(most, scratch.exports[r]);
  return most;
}

}  // namespace detail

// Collects the replicas of each expert. If plans may cross domains, a transfer's sources are still
// to be chosen: see collect_entries(). For a team of one the plan has been validated, and it
// counts without branching on the values: no branch predictor knows the next plan. Of what is no
// expert, a larger team writes nothing: the plan may be checked meanwhile.
template <class Team, class Slots>
UEC_HD_NOINLINE PlanShape collect_replicas(Team team, const Topology& topology,
                                           const int32_t* slot_expert, Slots choice,
                                           const ScheduleScratch& arrays, Schedule& schedule) {
  const Topology t = topology;
  const ScheduleScratch scratch = arrays;
  const Schedule s = schedule;
  PlanShape shape;
  const int32_t slots = t.slots_per_rank;
  const bool alone = team.size() == 1;
  const uint32_t num_legal = alone ? 1u << 31 : static_cast<uint32_t>(t.num_experts);
  const auto is_expert = [&](int32_t e) { return static_cast<uint32_t>(e) < num_legal; };
  const auto expert_at = [&](int32_t at) {
    const int32_t e = slot_expert[at];
    return choice.takes(at, e) ? e : -1;
  };
  int32_t* const count = scratch.count + 1;  // of empty slots too, at -1
  int32_t* const filled = s.boundary;        // [R] slots; free until hubs are assigned
  UEC_ROLLED
  for (int32_t e = team.index(); e <= t.num_experts; e += team.size()) scratch.count[e] = 0;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) scratch.exports[r] = 0;
  const Run ranks = Run::of(team, t.num_ranks);
  uint32_t own = 0;
  for (int32_t at = ranks.begin * slots; at < ranks.end * slots; ++at)
    own += is_expert(expert_at(at));
  auto placed = static_cast<int32_t>(team.exclusive_sum(own));  // all counts are zero from here on
  int32_t max_imports = 0;
  UEC_ROLLED
  for (int32_t r = ranks.begin, at = r * slots; r < ranks.end; ++r) {
    const int32_t before = placed;
    UEC_ROLLED
    for (int32_t i = 0; i < slots; ++i, ++at) {
      const int32_t e = expert_at(at);
      if (alone || is_expert(e)) {
        filled[placed] = at;
        team.atomic_add(&count[e], 1);
      }
      placed += is_expert(e);
    }
    max_imports = max32(max_imports, placed - before);
  }
  shape.num_replicas = team.read_from(team.size() - 1, placed);
  shape.max_imports = static_cast<int32_t>(highest(team, static_cast<uint32_t>(max_imports)));
  if (shape.num_replicas == 0) {
    if (team.leader()) schedule.num_experts = s.first[0] = 0;
    team.sync();
    return shape;
  }

  // Counting sort by expert: ranks are visited in order, so replicas come out in rank order.
  const Run experts = Run::of(team, t.num_experts);
  uint32_t replicas_before = 0, experts_before = 0;
  for (int32_t e = experts.begin; e < experts.end; ++e) {
    replicas_before += static_cast<uint32_t>(count[e]);
    experts_before += count[e] > 0;
  }
  const uint64_t both = team.exclusive_sum(replicas_before | uint64_t{experts_before} << 32);
  placed = static_cast<int32_t>(both);
  auto x = static_cast<int32_t>(both >> 32);
  int32_t max_fanout = 0;
  UEC_ROLLED
  for (int32_t e = experts.begin; e < experts.end && placed < shape.num_replicas; ++e) {
    const int32_t n = count[e];
    if (alone || n > 0) {
      s.expert[x] = e;  // stays if there are any
      s.first[x] = placed;
    }
    x += n > 0;
    count[e] = placed;  // from here on: where the next replica of e goes
    placed += n;
    max_fanout = max32(max_fanout, n);
  }
  const int32_t num_experts = team.read_from(team.size() - 1, x);
  if (team.leader()) {
    schedule.num_experts = num_experts;
    s.first[num_experts] = shape.num_replicas;
  }
  shape.max_fanout = static_cast<int32_t>(highest(team, static_cast<uint32_t>(max_fanout)));

  int32_t max_exports = 0;
  UEC_ROLLED
  for (int32_t i = team.index(); i < num_experts; i += team.size()) {
    const int32_t home = t.home[s.expert[i]];
    s.source[i] = {home, kMainSlot};
    max_exports = max32(max_exports, 1 + team.atomic_add(&scratch.exports[home], 1));
  }
  if (choice.resident != nullptr && !t.allow_cross_domain)
    max_exports = detail::choose_sources<false>(team, t, slot_expert, choice.resident, num_experts,
                                                scratch, schedule);
  shape.max_exports = static_cast<int32_t>(highest(team, static_cast<uint32_t>(max_exports)));
  bool chained = false;
  UEC_ROLLED
  for (int32_t begin = 0; begin < shape.num_replicas; begin += team.size()) {
    const int32_t i = begin + team.index();
    const bool is_one = i < shape.num_replicas;
    const int32_t at = is_one ? filled[i] : 0;
    const int32_t e = is_one ? slot_expert[at] : -1;
    const int32_t nth = team.equal_before(static_cast<uint32_t>(e));
    const int32_t to = count[e] + nth;
    team.sync();  // the next ones go behind these
    if (is_one) {
      const int32_t r = at / slots;
      team.atomic_add(&count[e], 1);
      s.replica_rank[to] = r;
      s.replica_slot[to] = at - r * slots;
      chained |= scratch.exports[r] > 0;
    }
  }
  shape.chained = team.count(chained).all > 0;
  return shape;
}

// Where plans may cross domains: splits each collected expert into an entry for each domain that
// its replicas lie in, in the order of their numbers, and chooses the sources. `before`: what
// collect_replicas() has returned.
template <class Team, class Slots>
UEC_HD_NOINLINE PlanShape split_by_domain(Team team, const Topology& topology,
                                          const int32_t* slot_expert, Slots choice,
                                          const PlanShape& before, const ScheduleScratch& arrays,
                                          Schedule& schedule) {
  const Topology t = topology;
  const ScheduleScratch scratch = arrays;
  const Schedule s = schedule;
  PlanShape shape;
  const int32_t num_replicas = shape.num_replicas = before.num_replicas;
  shape.max_imports = before.max_imports;
  UEC_ROLLED
  for (int32_t x = team.index(); x < schedule.num_experts; x += team.size()) {
    const int32_t begin = s.first[x], end = s.first[x + 1];
    // Sorted already where domains are runs of ranks.
    UEC_ROLLED
    for (int32_t i = begin + 1; i < end; ++i) {
      const int32_t rank = s.replica_rank[i], slot = s.replica_slot[i];
      int32_t to = i;
      UEC_ROLLED
      for (; to > begin && t.domain[s.replica_rank[to - 1]] > t.domain[rank]; --to) {
        s.replica_rank[to] = s.replica_rank[to - 1];
        s.replica_slot[to] = s.replica_slot[to - 1];
      }
      s.replica_rank[to] = rank;
      s.replica_slot[to] = slot;
    }
  }
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) scratch.exports[r] = 0;
  team.sync();
  const auto expert_at = [&](int32_t i) {
    return slot_expert[s.replica_rank[i] * t.slots_per_rank + s.replica_slot[i]];
  };
  int32_t num_entries = 0;
  UEC_ROLLED
  for (int32_t begin = 0; begin < num_replicas; begin += team.size()) {
    const int32_t i = begin + team.index();
    bool is_first = i == 0;
    if (i > 0 && i < num_replicas)
      is_first = expert_at(i) != expert_at(i - 1) ||
                 t.domain[s.replica_rank[i]] != t.domain[s.replica_rank[i - 1]];
    const MemberCount counted = team.count(is_first);
    if (is_first) {
      s.expert[num_entries + counted.before] = expert_at(i);
      s.first[num_entries + counted.before] = i;
    }
    num_entries += counted.all;
  }
  if (team.leader()) {
    schedule.num_experts = num_entries;
    s.first[num_entries] = num_replicas;
  }
  team.sync();
  int32_t max_exports = 0, max_fanout = 0;
  UEC_ROLLED
  for (int32_t x = team.index(); x < num_entries; x += team.size()) {
    const int32_t home = t.home[s.expert[x]];
    s.source[x] = {home, kMainSlot};
    max_exports = max32(max_exports, 1 + team.atomic_add(&scratch.exports[home], 1));
    max_fanout = max32(max_fanout, s.num_replicas(x));
  }
  if (choice.resident != nullptr)
    max_exports = detail::choose_sources<true>(team, topology, slot_expert, choice.resident,
                                               num_entries, arrays, schedule);
  shape.max_exports = static_cast<int32_t>(highest(team, static_cast<uint32_t>(max_exports)));
  shape.max_fanout = static_cast<int32_t>(highest(team, static_cast<uint32_t>(max_fanout)));
  bool sends = false, relays = false;
  UEC_ROLLED
  for (int32_t i = team.index(); i < num_replicas; i += team.size())
    sends |= scratch.exports[s.replica_rank[i]] > 0;
  UEC_ROLLED
  for (int32_t x = team.index(); x < num_entries; x += team.size())
    relays |= s.num_replicas(x) > 1 && detail::is_foreign(t.domain, s, x);
  shape.chained = team.count(sends).all > 0;
  shape.relays = team.count(relays).all > 0;
  return shape;
}

// Collects the entries of a transfer, or the experts of a reduction. The latter are not split: the
// order of sums, and with it every bit, does not depend on domains.
template <class Team, class Slots>
UEC_HD PlanShape collect_entries(Team team, const Topology& t, const int32_t* slot_expert,
                                 Slots choice, const ScheduleScratch& scratch, Schedule& schedule) {
  PlanShape shape = collect_replicas(team, t, slot_expert, choice, scratch, schedule);
  if (Slots::kByDomain && t.allow_cross_domain)
    shape = split_by_domain(team, t, slot_expert, choice, shape, scratch, schedule);
  return shape;
}

}  // namespace uec
