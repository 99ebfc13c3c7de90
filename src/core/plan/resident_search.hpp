// The search for moves: which experts go into which slots, so that residents and they have room for
// all tokens.
//
// Tokens flow to who holds their expert (resident_flow.hpp). Then two variants of a search go on
// side by side: in a step each moves one expert, and tokens flow again. The first that leaves no
// rank with too many is the plan. A team works on one variant: on a device, a warp of the block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/scratch.hpp"
#include "core/base/team.hpp"
#include "core/plan/resident_flow.hpp"

namespace uec {

// A plan's score; less is better, and the first field that differs decides.
struct ResidentScore {
  int64_t over;  // tokens of the fullest rank above the threshold
  int32_t transfer, moves, instances;

  UEC_HD bool is_better_than(const ResidentScore& other) const {
    if (over != other.over) return over < other.over;
    if (transfer != other.transfer) return transfer < other.transfer;
    if (moves != other.moves) return moves < other.moves;
    return instances < other.instances;
  }
};

inline constexpr int32_t kResidentVariants = 2;  // of a search
inline constexpr int32_t kResidentTrials = 4;    // moves that may be undone

// What one team uses. Aligned to 8 bytes; nothing in it needs to be initialised.
struct ResidentTeamScratch {
  FlowScratch flow;
  uint32_t* lack;    // [2][G] as find_room() leaves it
  int32_t* is_sent;  // [E] whether an expert moves
  int32_t* exports;  // [G] experts at home on a rank that move
  int32_t* imports;  // [G] moves to a rank
  int32_t* moved;    // [G * S] slots that move
  int64_t bytes;

  UEC_HD ResidentTeamScratch(const Topology& topology, std::byte* memory)
      : ResidentTeamScratch(topology, ScratchCutter(memory)) {}

 private:
  UEC_HD ResidentTeamScratch(const Topology& t, ScratchCutter cutter)
      : flow(t, cutter.take_bytes(FlowScratch(t, nullptr).bytes)),
        lack(cutter.take<uint32_t>(int64_t{2} * t.num_ranks)),
        is_sent(cutter.take<int32_t>(t.num_experts)),
        exports(cutter.take<int32_t>(t.num_ranks)),
        imports(cutter.take<int32_t>(t.num_ranks)),
        moved(cutter.take<int32_t>(int64_t{t.num_ranks} * t.slots_per_rank)),
        bytes(round_up(cutter.used_bytes(), 8)) {}
};

// What all teams share, likewise.
struct ResidentScratch {
  // The trials', or the variants'; one to begin with or to spare; and the plan from empty slots.
  static constexpr int32_t kStates = kResidentTrials + 2;

  std::byte* states;        // [kStates] of an Assignment each
  int64_t* excess;          // [kStates] of a state; -1: its variant has ended, or its trial failed
  ResidentScore* score;     // [kStates]
  int32_t* planned_expert;  // [G * S] of a plan from empty slots
  int32_t* planned_quota;   // [G * S]
  int64_t state_bytes;
  int64_t bytes;

  UEC_HD ResidentScratch(const Topology& t, std::byte* memory) {
    const int64_t num_slots = int64_t{t.num_ranks} * t.slots_per_rank;
    ScratchCutter cutter(memory);
    state_bytes = Assignment(t, nullptr).bytes;
    states = cutter.take_bytes(kStates * state_bytes);
    excess = cutter.take<int64_t>(kStates);
    score = cutter.take<ResidentScore>(kStates);
    planned_expert = cutter.take<int32_t>(num_slots);
    planned_quota = cutter.take<int32_t>(num_slots);
    bytes = round_up(cutter.used_bytes(), 8);
  }
  UEC_HD Assignment state(const Topology& topology, int32_t i) const {
    return Assignment(topology, states + i * state_bytes);
  }
};

// The input of a plan on top of residents.
struct ResidentTask {
  const int64_t* load;       // [E]
  const int64_t* rank_load;  // [G] without replicas; padded, if the plan is to be exact
  const int32_t* residents;  // [G, S]
  int64_t threshold;         // tokens of a rank that are few enough
};

// What a search takes first.
struct ResidentVariant {
  bool from_end;  // the hot rank with the most excess; else with the least
  bool by_load;   // by tokens that can leave, then load per instance; else by all of the main one
};

// One team's part: a variant, and what else takes a team.
template <class Team>
class ResidentTeam {
 public:
  UEC_HD ResidentTeam(const Topology& topology, const ResidentTask& task,
                      const ResidentTeamScratch& scratch)
      : t_(topology), task_(task), s_(scratch), flow_(topology, scratch.flow) {}

  UEC_HD Flow<Team>& flow() { return flow_; }

  // No tokens in any slot.
  UEC_HD void start(const Assignment& h, int64_t threshold) const {
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      h.over[r] = task_.rank_load[r] - threshold;
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) {
      h.home_quota[e] = static_cast<int32_t>(task_.load[e]);
      h.copies[e] = 0;
    }
    team_.sync();
    for (int32_t i = team_.index(); i < num_slots(); i += team_.size()) {
      h.slot_expert[i] = task_.residents[i];
      h.slot_quota[i] = 0;
      if (task_.residents[i] >= 0) team_.atomic_add(h.copies + task_.residents[i], 1);
    }
    team_.sync();
  }

  // Moves an expert, if one is found that could help, and lets tokens flow. Returns what is in
  // excess then; -1: there is no such expert.
  UEC_HD int64_t step(const Assignment& h, const ResidentVariant& variant) {
    flow_.find_reach(h, hot_rank(h, variant.from_end));
    find_traffic(h);
    find_room(h);
    int64_t excess = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      if (flow_.is_reached(r)) excess += max64(h.over[r], 0);
    excess = static_cast<int64_t>(team_.sum(static_cast<uint64_t>(excess)));
    const int32_t expert = choose_expert(h, variant, excess);
    const int32_t slot = expert < 0 ? -1 : choose_slot(h, excess, expert);
    if (slot < 0) return -1;
    flow_.put(h, slot, expert);
    return flow_.relieve_all(h);
  }

  // Undoes the n-th smallest move. Returns whether all tokens still have room.
  UEC_HD bool undo(const Assignment& h, int32_t n) {
    int32_t count = 0;
    for (int32_t first = 0; first < num_slots(); first += team_.size()) {
      const int32_t i = first + team_.index();
      const bool has_moved =
          i < num_slots() && h.slot_expert[i] != task_.residents[i] && h.slot_quota[i] > 0;
      const MemberCount moved = team_.count(has_moved);
      if (has_moved) s_.moved[count + moved.before] = i;
      count += moved.all;
    }
    if (n >= count) return false;
    team_.sync();
    uint32_t slot = ~0u;
    for (int32_t k = team_.index(); k < count; k += team_.size()) {
      const int32_t own = s_.moved[k], quota = h.slot_quota[own];
      int32_t smaller = 0;
      for (int32_t j = 0; j < count; ++j) {
        const int32_t other = h.slot_quota[s_.moved[j]];
        smaller += other < quota || (other == quota && j < k);
      }
      if (smaller == n) slot = static_cast<uint32_t>(own);
    }
    slot = team_.min_sync(slot);
    flow_.put(h, static_cast<int32_t>(slot), task_.residents[slot]);
    return flow_.relieve_all(h) == 0;
  }

  // Moves without tokens are none; residents give their tokens back to homes that have room.
  UEC_HD void empty_slots(const Assignment& h) const {
    for (int32_t i = team_.index(); i < num_slots(); i += team_.size())
      if (h.slot_quota[i] == 0) h.slot_expert[i] = task_.residents[i];
    team_.sync();
    const auto is_needless = [&](int32_t slot) {
      const int32_t quota = h.slot_quota[slot], e = h.slot_expert[slot];
      return quota > 0 && e == task_.residents[slot] && quota <= -h.over[t_.home[e]];
    };
    for (int32_t i = -1; (i = find_first(team_, i + 1, num_slots(), is_needless)) < num_slots();) {
      if (team_.leader()) flow_.give(h, i, -h.slot_quota[i]);
      team_.sync();
    }
  }

  // Lays a plan made from empty slots over the residents, without moving what is in place already.
  UEC_HD void overlay_empty_plan(const Assignment& h, const int32_t* planned_expert,
                                 const int32_t* planned_quota) const {
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      const int32_t begin = r * t_.slots_per_rank, end = begin + t_.slots_per_rank;
      for (int32_t n = begin; n < end; ++n)
        lay(h, begin, planned_expert[n], planned_quota[n], true);
      for (int32_t n = begin; n < end; ++n)
        lay(h, begin, planned_expert[n], planned_quota[n], false);
    }
    team_.sync();
  }

  // `extra`: tokens of the threshold above the task's.
  UEC_HD ResidentScore score(const Assignment& h, int64_t extra) const {
    find_traffic(h);
    int64_t fullest = 0;
    int32_t transfer = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      fullest = max64(fullest, h.over[r] + extra);
      transfer = max32(transfer, max32(s_.imports[r], s_.exports[r]));
    }
    uint32_t moves = 0, instances = 0;
    for (int32_t i = team_.index(); i < num_slots(); i += team_.size()) {
      moves += h.slot_expert[i] != task_.residents[i];
      instances += h.slot_quota[i] > 0;
    }
    return {static_cast<int64_t>(highest(team_, static_cast<uint64_t>(fullest))),
            static_cast<int32_t>(highest(team_, static_cast<uint32_t>(transfer))),
            static_cast<int32_t>(team_.sum(moves)), static_cast<int32_t>(team_.sum(instances))};
  }

 private:
  UEC_HD int32_t num_slots() const { return t_.num_ranks * t_.slots_per_rank; }

  // The rank with the least tokens above the threshold, or the most.
  UEC_HD int32_t hot_rank(const Assignment& h, bool from_end) const {
    const uint32_t flip = from_end ? ~0u : 0;
    SortKey<3> best{};
    int32_t found = -1;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      const int64_t over = h.over[r];
      if (over <= 0) continue;
      const SortKey<3> key{
          {high_word(over) ^ flip, low_word(over) ^ flip, static_cast<uint32_t>(r) ^ flip}};
      if (found < 0 || goes_before(key, best)) {
        best = key;
        found = r;
      }
    }
    return holder(found >= 0, best, found);
  }

  // Which slots move, and how many leave or enter a rank.
  UEC_HD void find_traffic(const Assignment& h) const {
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      s_.imports[r] = s_.exports[r] = 0;
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) s_.is_sent[e] = 0;
    team_.sync();
    flow_.each_slot([&](int32_t slot, int32_t rank) {
      const int32_t e = h.slot_expert[slot];
      if (e == task_.residents[slot]) return;
      if (team_.atomic_add(s_.is_sent + e, 1) == 0) team_.atomic_add(s_.exports + t_.home[e], 1);
      team_.atomic_add(s_.imports + rank, 1);
    });
    team_.sync();
  }

  // What each rank lacks to the largest room, or the best to which it can pass tokens in two steps.
  UEC_HD void find_room(const Assignment& h) const {
    uint32_t *lack = s_.lack, *next = s_.lack + t_.num_ranks;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      lack[r] = kMaxQuota - static_cast<uint32_t>(min64(max64(-h.over[r], 0), kMaxQuota));
    for (int32_t n = 0; n < 2; ++n) {
      team_.sync();
      for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) next[r] = lack[r];
      team_.sync();
      flow_.each_edge(h, [&](int32_t slot, int32_t rank, int32_t e, int32_t home) {
        pass(next + rank, h.slot_quota[slot], lack[home]);
        pass(next + home, h.home_quota[e], lack[rank]);
      });
      uint32_t* const last = lack;
      lack = next;
      next = last;
    }
    team_.sync();
  }
  UEC_HD void pass(uint32_t* lack, int32_t quota, uint32_t least) const {
    const uint32_t of_quota = kMaxQuota - static_cast<uint32_t>(quota);
    const uint32_t passed = of_quota > least ? of_quota : least;
    if (passed < kMaxQuota) team_.atomic_min(lack, passed);  // else it changes nothing
  }

  // The first expert of those that could relieve a hot rank, or -1. No rank sends more than one.
  UEC_HD int32_t choose_expert(const Assignment& h, const ResidentVariant& variant,
                               int64_t excess) const {
    SortKey<3> best{};
    int32_t found = -1;
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) {
      const int32_t home = t_.home[e], quota = h.home_quota[e];
      if (quota <= 0 || !flow_.is_reached(home)) continue;
      if (s_.is_sent[e] == 0 && s_.exports[home] > 0) continue;
      SortKey<3> key{{~static_cast<uint32_t>(quota), 0, static_cast<uint32_t>(e)}};
      if (variant.by_load) {
        key.word[0] = ~static_cast<uint32_t>(min64(quota, excess));
        key.word[1] = ~static_cast<uint32_t>(task_.load[e] >> min32(h.copies[e], 31));
      }
      if (found < 0 || goes_before(key, best)) {
        best = key;
        found = e;
      }
    }
    return holder(found >= 0, best, found);
  }
  // The best slot for an expert, or -1. No rank gets more than one.
  UEC_HD int32_t choose_slot(const Assignment& h, int64_t excess, int32_t expert) const {
    const int32_t quota_at_home = h.home_quota[expert];
    SortKey<5> best{};
    int32_t found = -1;
    flow_.each_slot([&](int32_t slot, int32_t rank) {
      const int64_t shared = kMaxQuota - s_.lack[rank];
      if (shared == 0 || flow_.is_reached(rank) || s_.imports[rank] > 0) return;
      const int32_t old = h.slot_expert[slot], quota = h.slot_quota[slot];
      if (old != task_.residents[slot]) return;
      if (!t_.may_hold(expert, rank) || is_on(h, expert, rank)) return;
      // What the resident has taken goes home first, where there may be no room for it.
      int64_t back = 0, price = int64_t{quota} - 1;
      if (old >= 0) {
        back = max64(quota - max64(-h.over[t_.home[old]], 0), 0);
        price = quota + (task_.load[old] >> min32(h.copies[old] - 1, 31));
      }
      const int64_t space = max64(quota - h.over[rank], shared);
      const int64_t gain = min64(quota_at_home, min64(excess + back, space));
      const int64_t left = excess + back - gain, cost = space - gain + 2 * price;
      const SortKey<5> key{{high_word(left), low_word(left), high_word(cost), low_word(cost),
                            static_cast<uint32_t>(slot)}};
      if (found >= 0 && !goes_before(key, best)) return;
      best = key;
      found = slot;
    });
    return holder(found >= 0, best, found);
  }
  // Whether a rank has an expert in a slot, or had it.
  UEC_HD bool is_on(const Assignment& h, int32_t expert, int32_t rank) const {
    const int32_t begin = rank * t_.slots_per_rank;
    for (int32_t i = begin; i < begin + t_.slots_per_rank; ++i)
      if (h.slot_expert[i] == expert || task_.residents[i] == expert) return true;
    return false;
  }

  // By one member, of a rank's slots: gives one planned replica its slot.
  UEC_HD void lay(const Assignment& h, int32_t begin, int32_t expert, int32_t quota,
                  bool is_held) const {
    if (expert < 0) return;
    const int32_t end = begin + t_.slots_per_rank;
    int32_t at = begin;
    while (at < end && task_.residents[at] != expert) ++at;
    if ((at < end) != is_held) return;
    if (!is_held) {
      int64_t least = 0;
      for (int32_t i = begin; i < end; ++i) {
        if (h.slot_quota[i] != 0) continue;
        const int64_t value = h.slot_expert[i] < 0 ? -1 : task_.load[h.slot_expert[i]];
        if (at < end && value >= least) continue;
        least = value;
        at = i;
      }
      h.slot_expert[at] = expert;
    }
    h.slot_quota[at] = quota;
    team_.atomic_add(h.home_quota + expert, -quota);
    team_.atomic_add(h.over + begin / t_.slots_per_rank, int64_t{quota});
    team_.atomic_add(h.over + t_.home[expert], int64_t{-quota});
  }

  template <int32_t kCount>
  UEC_HD static bool goes_before(const SortKey<kCount>& a, const SortKey<kCount>& b) {
    UEC_UNROLLED
    for (int32_t i = 0; i < kCount; ++i)
      if (a.word[i] != b.word[i]) return a.word[i] < b.word[i];
    return false;
  }
  // The value of the member with the least key, for all; -1: none has any.
  template <int32_t kCount>
  UEC_HD int32_t holder(bool has_any, const SortKey<kCount>& key, int32_t value) const {
    return static_cast<int32_t>(
        team_.min_sync(holds_min(team_, has_any, key) ? static_cast<uint32_t>(value) : ~0u));
  }

  static constexpr int32_t kMaxQuota = INT32_MAX;

  const Team team_{};
  const Topology& t_;
  const ResidentTask& task_;
  const ResidentTeamScratch s_;
  Flow<Team> flow_;
};

// All threads of all teams call its functions, and have the same answers.
template <class TeamSet>
class ResidentSearch {
 public:
  UEC_HD ResidentSearch(TeamSet& teams, const Topology& topology, const ResidentTask& task,
                        const ResidentScratch& scratch, const ResidentTeamScratch& own)
      : teams_(teams), t_(topology), task_(task), s_(scratch), team_(topology, task, own) {}

  // Keeps the residents, and moves what is needed. Returns whether that will do; if not, a plan
  // from empty slots may be better: make it, into the scratch, and call again with `is_planned`.
  // (In one function, since a device would have the code of two twice.) Then best() is the plan.
  UEC_HD bool run(bool is_planned) {
    if (!is_planned) {
      best_ = search(task_.threshold);
      return best_ >= 0;
    }
    best_ = kLaid;
    if (teams_.index() == 0) {
      const Assignment laid = s_.state(t_, kLaid);
      team_.start(laid, task_.threshold);
      team_.overlay_empty_plan(laid, s_.planned_expert, s_.planned_quota);
      put_score(kLaid, 0);
    }
    teams_.exchange(0);
    const int64_t extra = s_.score[kLaid].over;
    const int32_t found = extra > 0 ? search(task_.threshold + extra) : -1;
    if (found < 0) return true;
    if (teams_.index() == 0) put_score(found, extra);
    teams_.exchange(0);
    if (s_.score[found].is_better_than(s_.score[kLaid])) best_ = found;
    return true;
  }

  UEC_HD Assignment best() const { return s_.state(t_, best_); }

 private:
  static constexpr int32_t kMaxSteps = 32, kMaxRises = 2;
  static constexpr int32_t kSpare = kResidentTrials, kLaid = kSpare + 1;

  UEC_HD void put_score(int32_t state, int64_t extra) const {
    const ResidentScore score = team_.score(s_.state(t_, state), extra);
    if (teams_.team().leader()) s_.score[state] = score;
  }

  // Returns the state of the first plan that is found, of two in one step the first variant's; -1:
  // there is none.
  UEC_HD int32_t search(int64_t threshold) {
    const Assignment first = s_.state(t_, kSpare);
    if (teams_.index() == 0) {
      team_.start(first, threshold);
      const int64_t left = team_.flow().relieve_all(first);
      if (teams_.team().leader()) s_.excess[kSpare] = left;
    }
    teams_.exchange(0);
    if (s_.excess[kSpare] == 0) return undo(kSpare);
    uint32_t rises = 0;  // a byte for each variant of this team
    for (int32_t n = 0; n < kMaxSteps; ++n) {
      bool is_done = false;  // by an earlier variant of this team
      for (int32_t v = teams_.index(), k = 0; v < kResidentVariants; v += teams_.size(), k += 8) {
        const Assignment own = s_.state(t_, v);
        if (n == 0) own.copy(teams_.team(), first);
        const int64_t before = s_.excess[n == 0 ? static_cast<int32_t>(kSpare) : v];
        int64_t left = -1;
        if (before > 0 && !is_done) left = team_.step(own, {.from_end = v == 0, .by_load = v == 0});
        if (left >= before && (rises >> k & 255) == kMaxRises) left = -1;
        if (left >= before) rises += 1u << k;
        is_done |= left == 0;
        teams_.team().sync();  // all have looked
        if (teams_.team().leader()) s_.excess[v] = left;
      }
      teams_.exchange(0);
      int32_t first_done = -1;
      bool has_more = false;
      for (int32_t v = kResidentVariants - 1; v >= 0; --v) {
        has_more |= s_.excess[v] > 0;
        if (s_.excess[v] == 0) first_done = v;
      }
      teams_.exchange(0);  // likewise
      if (first_done >= 0) return undo(first_done);
      if (!has_more) return -1;
    }
    return -1;
  }

  // Undoes the smallest move that is unnecessary, of some. Returns the state that is left.
  UEC_HD int32_t undo(int32_t found) {
    const auto state_of = [&](int32_t k) { return k == found ? static_cast<int32_t>(kSpare) : k; };
    const int32_t num_trials = found == kSpare ? 0 : kResidentTrials;  // nothing has moved there
    bool is_done = false;  // by an earlier trial of this team
    for (int32_t k = teams_.index(); k < num_trials; k += teams_.size()) {
      const Assignment trial = s_.state(t_, state_of(k));
      if (!is_done) trial.copy(teams_.team(), s_.state(t_, found));
      const bool is_enough = !is_done && team_.undo(trial, k);
      is_done |= is_enough;
      if (teams_.team().leader()) s_.excess[state_of(k)] = is_enough ? 0 : -1;
    }
    teams_.exchange(0);
    int32_t left = found;
    for (int32_t k = num_trials - 1; k >= 0; --k)
      if (s_.excess[state_of(k)] == 0) left = state_of(k);
    if (teams_.index() == 0) team_.empty_slots(s_.state(t_, left));
    teams_.exchange(0);
    return left;
  }

  TeamSet& teams_;
  const Topology& t_;
  const ResidentTask& task_;
  const ResidentScratch s_;
  ResidentTeam<typename TeamSet::Team> team_;
  int32_t best_ = 0;  // the state that is the best plan; -1: there is none yet
};

}  // namespace uec
