// The planner on top of residents: experts that slots still hold from earlier calls.
//
// The readable definition of the same algorithm is `ultraep_comm/plan/residents.py`; the two agree
// in every integer. The residents first: if tokens can flow to them (resident_flow.hpp) until no
// rank has too many, nothing moves. Otherwise one expert at a time moves, to where it relieves the
// most.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/scratch.hpp"
#include "core/plan/planner.hpp"
#include "core/plan/resident_flow.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

// Aligned to 8 bytes; nothing in it needs to be initialised, and nothing in it outlives the call.
struct ResidentScratch {
  std::byte* planner;       // of PlannerScratch
  std::byte* flow;          // of FlowScratch
  std::byte* holdings;      // of Holding: the current one, one to go back to, the best
  int64_t* group_room;      // [G] room on the ranks of a group
  int32_t* group;           // [G] a rank of the group to which a rank belongs
  int32_t* hot;             // [G] ranks in one reach that have too many tokens
  int32_t* imports;         // [G] moves to a rank
  int32_t* exports;         // [G] experts at home on a rank that move
  int32_t* is_exported;     // [E]
  int32_t* planned_expert;  // [G * S] of a plan from empty slots
  int32_t* planned_quota;   // [G * S]
  int64_t bytes;

  UEC_HD ResidentScratch(const Topology& topology, std::byte* memory) {
    const int64_t g = topology.num_ranks, e = topology.num_experts;
    const int64_t num_slots = g * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    planner = cutter.take_bytes(planner_scratch_bytes(topology));
    flow = cutter.take_bytes(FlowScratch(topology, nullptr).bytes);
    holdings = cutter.take_bytes(3 * Holding(topology, nullptr).bytes);
    group_room = cutter.take<int64_t>(g);
    group = cutter.take<int32_t>(g);
    hot = cutter.take<int32_t>(g);
    imports = cutter.take<int32_t>(g);
    exports = cutter.take<int32_t>(g);
    is_exported = cutter.take<int32_t>(e);
    planned_expert = cutter.take<int32_t>(num_slots);
    planned_quota = cutter.take<int32_t>(num_slots);
    bytes = cutter.used_bytes();
  }

  UEC_HD Holding holding(const Topology& topology, int32_t index) const {
    return Holding(topology, holdings + index * Holding(topology, nullptr).bytes);
  }
};

UEC_HD inline int64_t resident_scratch_bytes(const Topology& topology) {
  return ResidentScratch(topology, nullptr).bytes;
}

// Chooses the replicas and every instance's quota for one microbatch, given what the slots hold.
// A slot "moves" if its expert is not the resident: then it has to be written.
//
//   load        [E] as in plan_replicas()
//   residents   [G, S] expert in the slot, or -1: never at home, never twice on a rank, only where
//               Topology::may_hold allows
//   target_ppm  as in Objective, which has the words for what follows, too
//   slot_expert [G, S] out: expert in the slot or -1; a resident stays until its slot is needed
//   slot_quota  [G, S] out: tokens of that replica, 0 where a resident is not needed
//   home_quota  [E] out: tokens that stay on the main instance
//
// What is looked for, in this order: the least imbalance, down to the target; the least transfer of
// the moves; the fewest moves; the fewest instances in use. Guarantees: those of plan_replicas()
// on quotas and instances; a slot that moves has a quota; the fullest rank has no more tokens than
// under plan_replicas(), or no more than the target allows; without residents the plan is that of
// plan_replicas().
UEC_HD inline void plan_with_residents(const Topology& topology, const int64_t* load,
                                       const int32_t* residents, int64_t target_ppm,
                                       const ResidentScratch& scratch, int32_t* slot_expert,
                                       int32_t* slot_quota, int32_t* home_quota);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

// What a plan is judged by; less is better, the first that differs decides.
struct Verdict {
  int64_t fullest;
  int32_t transfer, moves, instances;

  UEC_HD bool is_better_than(const Verdict& other) const {
    if (fullest != other.fullest) return fullest < other.fullest;
    if (transfer != other.transfer) return transfer < other.transfer;
    if (moves != other.moves) return moves < other.moves;
    return instances < other.instances;
  }
};

// An expert of which more ranks should have a replica.
struct Source {
  int64_t supply;  // tokens that would go there if there were room, for the good of hot ranks
  int64_t need;    // by its load; each replica that it has already quarters it
  int32_t expert;

  UEC_HD bool goes_before(const Source& other) const {
    if (supply != other.supply) return supply > other.supply;
    return need != other.need ? need > other.need : expert < other.expert;
  }
};

// A move that might help.
struct Move {
  int64_t left;   // excess that would stay
  int64_t price;  // among those with as much, the cheapest is taken
  int32_t expert, slot;

  UEC_HD bool goes_before(const Move& other) const {
    if (left != other.left) return left < other.left;
    if (price != other.price) return price < other.price;
    return expert != other.expert ? expert < other.expert : slot < other.slot;
  }
};

class ResidentSearch {
 public:
  UEC_HD ResidentSearch(const Topology& topology, const int64_t* load, const int32_t* residents,
                        const PlannerScratch& planner, const ResidentScratch& scratch)
      : t_(topology),
        load_(load),
        residents_(residents),
        rank_load_(planner.rank_load),
        mains_begin_(planner.mains_begin),
        mains_(planner.mains),
        s_(scratch),
        flow_(topology, planner.mains_begin, planner.mains, FlowScratch(topology, scratch.flow)),
        now_(scratch.holding(topology, 0)),
        before_(scratch.holding(topology, 1)),
        best_(scratch.holding(topology, 2)) {}

  UEC_HD const Holding& best() const { return best_; }
  UEC_HD const Verdict& verdict() const { return verdict_; }

  // Keeps the residents, and moves what is needed under the threshold. Returns whether there is a
  // way, with the least transfer that has one.
  UEC_HD bool repair(int64_t threshold, int32_t last_cap) {
    flow_.set_threshold(threshold);
    for (int32_t cap = 1; cap < 2 * last_cap; cap = next_cap(cap, t_.slots_per_rank)) {
      for (int32_t retry = 0; retry < 2; ++retry) {
        hold_residents();
        if (!move_all(cap, retry == 1)) continue;
        undo_needless();
        empty_slots();
        keep_better();
        return true;
      }
    }
    return false;
  }

  // The plan from empty slots, laid over the residents.
  UEC_HD void lay_over(int64_t threshold, const int32_t* planned_expert,
                       const int32_t* planned_quota) {
    flow_.set_threshold(threshold);
    hold_residents();
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      const int32_t begin = r * t_.slots_per_rank, end = begin + t_.slots_per_rank;
      for (int32_t i = begin; i < end && planned_expert[i] >= 0; ++i) {
        const int32_t at = slot_of(planned_expert[i], begin);
        if (at < end) give(at, planned_quota[i]);
      }
      for (int32_t i = begin; i < end && planned_expert[i] >= 0; ++i) {
        if (slot_of(planned_expert[i], begin) < end) continue;
        int32_t at = -1;
        for (int32_t to = begin; to < end; ++to)
          if (now_.slot_quota[to] == 0 && (at < 0 || worth(to) < worth(at))) at = to;
        replace(at, planned_expert[i]);
        give(at, planned_quota[i]);
      }
    }
    keep_better();
  }

  // Tokens of the fullest rank, or the threshold if that is more.
  UEC_HD int64_t fullest(const Holding& h) const {
    int64_t most = flow_.threshold();
    for (int32_t r = 0; r < t_.num_ranks; ++r) most = max64(most, h.tokens[r]);
    return most;
  }

 private:
  static constexpr int32_t kMaxTrials = 5, kMaxSources = 8;

  UEC_HD bool has_moved(int32_t slot) const { return now_.slot_expert[slot] != residents_[slot]; }
  // Of what a slot holds: its expert's load, halved by each other replica; -1 if it is empty.
  UEC_HD int64_t worth(int32_t slot) const {
    const int32_t e = now_.slot_expert[slot];
    if (e < 0) return -1;
    int32_t others = -1;
    for (int32_t at = now_.first_slot[e]; at >= 0; at = now_.next_slot[at]) ++others;
    return load_[e] >> min32(others, 32);
  }
  // Of the rank whose first slot that is; the slot after its last if it has none.
  UEC_HD int32_t slot_of(int32_t expert, int32_t begin) const {
    int32_t i = begin;
    while (i < begin + t_.slots_per_rank && now_.slot_expert[i] != expert) ++i;
    return i;
  }

  UEC_HD void hold_residents() {
    flow_.forget();
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      now_.tokens[r] = rank_load_[r];
      s_.imports[r] = s_.exports[r] = 0;
    }
    for (int32_t e = 0; e < t_.num_experts; ++e) {
      now_.home_quota[e] = static_cast<int32_t>(load_[e]);
      now_.first_slot[e] = -1;
      s_.is_exported[e] = 0;
    }
    for (int32_t i = t_.num_ranks * t_.slots_per_rank - 1; i >= 0; --i) {
      now_.slot_quota[i] = 0;
      now_.slot_expert[i] = now_.next_slot[i] = -1;
      if (residents_[i] >= 0) now_.add(i, residents_[i]);
    }
  }
  // Tokens of the main instance, for a slot that holds the expert.
  UEC_HD void give(int32_t slot, int32_t tokens) const {
    const int32_t e = now_.slot_expert[slot];
    now_.slot_quota[slot] += tokens;
    now_.home_quota[e] -= tokens;
    now_.tokens[flow_.rank_of(slot)] += tokens;
    now_.tokens[t_.home[e]] -= tokens;
  }
  // The slot's tokens go home. Returns the home, or -1 if there was nothing.
  UEC_HD int32_t replace(int32_t slot, int32_t expert) {
    flow_.forget();
    const int32_t old = now_.slot_expert[slot];
    if (old >= 0) {
      give(slot, -now_.slot_quota[slot]);
      now_.remove(slot);
    }
    if (expert >= 0) now_.add(slot, expert);
    return old < 0 ? -1 : t_.home[old];
  }

  UEC_HD void go_back() {
    flow_.forget();
    now_.copy(before_);
  }

  UEC_HD int32_t next_hot(bool fullest_first) const {
    int32_t hot = -1;
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      const int64_t tokens = now_.tokens[r];
      if (tokens <= flow_.threshold()) continue;
      if (hot < 0 || (fullest_first ? tokens > now_.tokens[hot] : tokens < now_.tokens[hot]))
        hot = r;
    }
    return hot;
  }

  // Relieves one hot rank after the other. A retry begins at the other end, and looks at more
  // experts.
  UEC_HD bool move_all(int32_t cap, bool is_retry) {
    flow_.relieve_all(now_);
    for (;;) {
      const int32_t hot = next_hot(is_retry);
      if (hot < 0) return true;
      if (flow_.relieve(now_, hot)) continue;
      find_sources(cap, is_retry ? kMaxSources : 1);
      find_groups();
      if (try_moves(cap, true)) continue;
      flow_.relieve(now_, hot);  // for its reach
      if (!try_moves(cap, false)) return false;
    }
  }

  // The experts of which ranks in the hot rank's reach have tokens: all who have such tokens, and
  // the home, are in reach.
  UEC_HD void find_sources(int32_t cap, int32_t most) {
    flow_.measure_supply(now_);
    excess_ = 0;
    num_hot_ = num_sources_ = 0;
    for (int32_t i = 0; i < flow_.count(); ++i) {
      const int64_t excess = flow_.excess(now_, flow_.reached(i));
      if (excess == 0) continue;
      excess_ += excess;
      s_.hot[num_hot_++] = flow_.reached(i);
    }
    for (int32_t i = 0; i < flow_.count(); ++i) {
      const int32_t rank = flow_.reached(i);
      for (int32_t m = mains_begin_[rank]; m < mains_begin_[rank + 1]; ++m) {
        const int32_t e = mains_[m];
        if (s_.exports[rank] >= cap && s_.is_exported[e] == 0) continue;
        int64_t supply = min64(flow_.supply(rank), now_.home_quota[e]);
        int32_t replicas = 0;
        for (int32_t at = now_.first_slot[e]; at >= 0; at = now_.next_slot[at], ++replicas)
          if (now_.slot_quota[at] > 0 && flow_.is_reached(flow_.rank_of(at)))
            supply += min64(flow_.supply(flow_.rank_of(at)), now_.slot_quota[at]);
        if (supply == 0) continue;
        const Source source{min64(supply, excess_), load_[e] >> min32(2 * replicas, 32), e};
        num_sources_ = insert(source, sources_, num_sources_, most);
      }
    }
  }

  // Ranks that can hand tokens to one another are a group: what one of them takes, all make room
  // for.
  UEC_HD void find_groups() {
    const int32_t slots = t_.slots_per_rank;
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      s_.group[r] = r;
      s_.group_room[r] = 0;
    }
    for (int32_t i = 0; i < t_.num_ranks * slots; ++i) {
      if (now_.slot_quota[i] == 0) continue;
      const int32_t e = now_.slot_expert[i];
      int32_t other = t_.home[e];
      if (now_.home_quota[e] == 0) {
        int32_t at = now_.first_slot[e];
        while (now_.slot_quota[at] == 0) at = now_.next_slot[at];
        other = flow_.rank_of(at);
      }
      const int32_t a = leader(flow_.rank_of(i)), b = leader(other);
      s_.group[max32(a, b)] = min32(a, b);
    }
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      s_.group[r] = s_.group[s_.group[r]];  // a leader is before all it leads
      s_.group_room[s_.group[r]] += max64(flow_.room(now_, r), 0);
    }
  }
  UEC_HD int32_t leader(int32_t rank) const {
    while (s_.group[rank] != rank) rank = s_.group[rank] = s_.group[s_.group[rank]];
    return rank;
  }

  // Makes a move that helps the hot rank's reach: the first that does all that is expected of
  // it, of the few that look best, or the one that does most. By groups: what a rank cannot take
  // itself, others of its group may. Returns whether one does help.
  UEC_HD bool try_moves(int32_t cap, bool by_groups) {
    Move moves[kMaxTrials];
    const int32_t count = find_moves(cap, by_groups, moves);
    const int64_t total = flow_.excess(now_);
    int64_t most = 0;
    int32_t best = -1;
    before_.copy(now_);
    for (int32_t i = 0; i < count; ++i) {
      make(moves[i]);
      const int64_t gain = total - flow_.excess(now_);
      if (gain > 0 && gain >= excess_ - moves[i].left) return record(moves[i]);
      if (gain > most) {
        most = gain;
        best = i;
      }
      go_back();
    }
    if (best < 0) return false;
    make(moves[best]);
    return record(moves[best]);
  }
  UEC_HD void make(const Move& move) {
    const int32_t home = replace(move.slot, move.expert);
    for (int32_t i = 0; i < num_hot_; ++i) flow_.relieve(now_, s_.hot[i]);
    if (home >= 0) flow_.relieve(now_, home);
  }
  UEC_HD bool record(const Move& move) const {
    ++s_.imports[flow_.rank_of(move.slot)];
    if (s_.is_exported[move.expert] == 0) ++s_.exports[t_.home[move.expert]];
    s_.is_exported[move.expert] = 1;
    return true;
  }

  UEC_HD int32_t find_moves(int32_t cap, bool by_groups, Move* moves) const {
    const int32_t slots = t_.slots_per_rank;
    int32_t count = 0;
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      const int64_t own = flow_.room(now_, r);
      const int64_t shared = by_groups ? s_.group_room[s_.group[r]] : own;
      if (shared <= 0 || s_.imports[r] >= cap || flow_.is_reached(r)) continue;
      const int32_t begin = r * slots;
      for (int32_t i = begin; i < begin + slots; ++i) {
        const int32_t old = now_.slot_expert[i];
        if (has_moved(i) || (old < 0 && slot_of(-1, begin) < i)) continue;
        // What the resident has taken goes home first, where there may be no room for it.
        const int64_t quota = now_.slot_quota[i];
        int64_t back = 0;
        if (quota > 0) back = max64(quota - max64(flow_.room(now_, t_.home[old]), 0), 0);
        const int64_t room = max64(own + quota, shared);
        for (int32_t k = 0; k < num_sources_; ++k) {
          const Source& source = sources_[k];
          const int64_t gain = min64(source.supply, room);
          const int64_t left = excess_ - gain + back;
          if (count == kMaxTrials && left > moves[count - 1].left) continue;
          if (!t_.may_hold(source.expert, r) || is_resident(source.expert, begin)) continue;
          const int64_t price = room - gain + 2 * (quota + worth(i));
          count = insert(Move{left, price, source.expert, i}, moves, count, kMaxTrials);
        }
      }
    }
    return count;
  }

  // Into a sorted list of the first `most`. Returns how many there are then.
  template <class T>
  UEC_HD static int32_t insert(const T& value, T* list, int32_t count, int32_t most) {
    if (count == most) {
      if (!value.goes_before(list[count - 1])) return count;
      --count;
    }
    int32_t at = count;
    for (; at > 0 && value.goes_before(list[at - 1]); --at) list[at] = list[at - 1];
    list[at] = value;
    return count + 1;
  }

  UEC_HD bool is_resident(int32_t expert, int32_t begin) const {
    for (int32_t i = begin; i < begin + t_.slots_per_rank; ++i)
      if (residents_[i] == expert) return true;
    return false;
  }

  // Later moves may have made earlier ones needless. One with a large quota next to the room that
  // all ranks have hardly ever is, and a search for that would find every rank full.
  UEC_HD void undo_needless() {
    int64_t room = 0;
    for (int32_t r = 0; r < t_.num_ranks; ++r) room += flow_.room(now_, r);
    for (int32_t i = 0; i < t_.num_ranks * t_.slots_per_rank; ++i) {
      if (!has_moved(i) || int64_t{4} * now_.slot_quota[i] > room) continue;
      before_.copy(now_);
      if (!flow_.relieve(now_, replace(i, residents_[i]))) go_back();
    }
  }
  // Residents give their tokens back to homes that have room.
  UEC_HD void empty_slots() const {
    for (int32_t i = 0; i < t_.num_ranks * t_.slots_per_rank; ++i) {
      const int32_t quota = now_.slot_quota[i];
      if (quota == 0 || has_moved(i)) continue;
      if (flow_.room(now_, t_.home[now_.slot_expert[i]]) >= quota) give(i, -quota);
    }
  }

  UEC_HD void keep_better() {
    const Verdict verdict = judge();
    if (has_best_ && !verdict.is_better_than(verdict_)) return;
    has_best_ = true;
    verdict_ = verdict;
    best_.copy(now_);
  }
  UEC_HD Verdict judge() const {
    Verdict verdict{fullest(now_), 0, 0, 0};
    for (int32_t r = 0; r < t_.num_ranks; ++r) s_.imports[r] = s_.exports[r] = 0;
    for (int32_t e = 0; e < t_.num_experts; ++e) s_.is_exported[e] = 0;
    for (int32_t i = 0; i < t_.num_ranks * t_.slots_per_rank; ++i) {
      verdict.instances += now_.slot_quota[i] > 0;
      if (!has_moved(i)) continue;
      ++verdict.moves;
      record({0, 0, now_.slot_expert[i], i});
    }
    for (int32_t r = 0; r < t_.num_ranks; ++r)
      verdict.transfer = max32(verdict.transfer, max32(s_.imports[r], s_.exports[r]));
    return verdict;
  }

  const Topology& t_;
  const int64_t* const load_;
  const int32_t* const residents_;
  const int64_t* const rank_load_;
  const int32_t* const mains_begin_;
  const int32_t* const mains_;
  const ResidentScratch s_;
  Flow flow_;
  const Holding now_, before_, best_;
  Verdict verdict_{};
  bool has_best_ = false;
  // Of the hot rank's reach:
  int64_t excess_ = 0;
  int32_t num_hot_ = 0, num_sources_ = 0;
  Source sources_[kMaxSources];
};

}  // namespace detail

UEC_HD inline void plan_with_residents(const Topology& topology, const int64_t* load,
                                       const int32_t* residents, int64_t target_ppm,
                                       const ResidentScratch& scratch, int32_t* slot_expert,
                                       int32_t* slot_quota, int32_t* home_quota) {
  const Objective objective{.target_ppm = target_ppm};
  const PlannerScratch planner(topology, scratch.planner);
  const int32_t num_slots = topology.num_ranks * topology.slots_per_rank;
  bool is_empty = true;
  for (int32_t i = 0; i < num_slots && is_empty; ++i) is_empty = residents[i] < 0;
  if (is_empty) {
    plan_replicas(topology, load, objective, planner, slot_expert, slot_quota, home_quota);
    return;
  }
  const auto make_goal = [&] {
    const SortedLoad sorted = detail::sort_load(topology, load, planner);
    if (objective.is_exact() && sorted.num_pools == 1) detail::pad_ranks(topology, planner);
    return find_goal(Alone{}, sorted, objective);
  };
  const int64_t threshold = make_goal().threshold;
  const int32_t last_cap =
      max32(group_mains(topology, planner.mains_begin, planner.mains), topology.slots_per_rank);
  detail::ResidentSearch search(topology, load, residents, planner, scratch);
  if (!search.repair(threshold, last_cap) || search.verdict().transfer > 1) {
    plan_replicas(topology, load, objective, planner, scratch.planned_expert, scratch.planned_quota,
                  home_quota);
    group_mains(topology, planner.mains_begin, planner.mains);
    search.lay_over(threshold, scratch.planned_expert, scratch.planned_quota);
    const int64_t fullest = search.verdict().fullest;
    if (fullest > threshold) search.repair(fullest, last_cap);
  }
  const Holding& best = search.best();
  for (int32_t i = 0; i < num_slots; ++i) {
    slot_expert[i] = best.slot_expert[i];
    slot_quota[i] = best.slot_quota[i];
  }
  for (int32_t e = 0; e < topology.num_experts; ++e) home_quota[e] = best.home_quota[e];
}

}  // namespace uec
