// The search for moves: which experts go into which slots, so that residents and they have room for
// all tokens. By a team: the planner's one thread, or a warp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/scratch.hpp"
#include "core/base/team.hpp"
#include "core/plan/pool_search.hpp"
#include "core/plan/resident_flow.hpp"

namespace uec {

// An expert that more ranks should replicate.
struct ResidentSource {
  int64_t supply;  // tokens that would go there if there were room, for the good of hot ranks
  int64_t need;    // by its load; each replica that it has already quarters it
  int64_t expert;  // a whole word, since what pads it would be copied, and have no value

  UEC_HD bool goes_before(const ResidentSource& other) const {
    if (supply != other.supply) return supply > other.supply;
    return need != other.need ? need > other.need : expert < other.expert;
  }
  UEC_HD SortKey<5> order() const {  // the same
    return {{~high_word(supply), ~low_word(supply), ~high_word(need), ~low_word(need),
             static_cast<uint32_t>(expert)}};
  }
};

// A move that might help.
struct ResidentMove {
  int64_t left;   // excess that would stay
  int64_t price;  // among those with as much, the cheapest is taken
  int32_t expert, slot;

  UEC_HD bool goes_before(const ResidentMove& other) const {
    if (left != other.left) return left < other.left;
    if (price != other.price) return price < other.price;
    return expert != other.expert ? expert < other.expert : slot < other.slot;
  }
  UEC_HD SortKey<6> order() const {  // the same
    return {{high_word(left), low_word(left), high_word(price), low_word(price),
             static_cast<uint32_t>(expert), static_cast<uint32_t>(slot)}};
  }
};

// A plan's score; less is better, and the first field that differs decides.
struct ResidentScore {
  int64_t fullest;
  int32_t transfer, moves, instances;

  UEC_HD bool is_better_than(const ResidentScore& other) const {
    if (fullest != other.fullest) return fullest < other.fullest;
    if (transfer != other.transfer) return transfer < other.transfer;
    if (moves != other.moves) return moves < other.moves;
    return instances < other.instances;
  }
};

// Scratch of a team of `num_members`. Aligned to 8 bytes; nothing in it needs to be initialised.
struct ResidentScratch {
  static constexpr int32_t kMaxTrials = 5, kMaxSources = 8;

  FlowScratch flow;
  Assignment now, before, best;  // the current one, one to go back to, and of the best plan
  ResidentScore* score;          // [1] of the best
  ResidentSource* sources;       // [members + 1][kMaxSources] each member's, then the first of all
  ResidentMove* moves;           // [members + 1][kMaxTrials] likewise
  int64_t* supply;               // [E] of replicas in one reach
  int64_t* group_room;           // [G] room on the ranks of a group
  uint32_t* group;               // [G] a rank of the group to which a rank belongs
  int32_t* hot;                  // [G] ranks in one reach that have too many tokens
  int32_t* imports;              // [G] moves to a rank
  int32_t* exports;              // [G] experts at home on a rank that move
  int32_t* is_exported;          // [E]
  int32_t* planned_expert;       // [G * S] of a plan from empty slots
  int32_t* planned_quota;        // [G * S]
  int64_t bytes;

  UEC_HD ResidentScratch(const Topology& topology, std::byte* memory, int32_t num_members = 1)
      : ResidentScratch(topology, ScratchCutter(memory), num_members) {}

 private:
  UEC_HD ResidentScratch(const Topology& t, ScratchCutter cutter, int32_t num_members)
      : flow(t, cutter.take_bytes(FlowScratch(t, nullptr).bytes)),
        now(t, cutter.take_bytes(Assignment(t, nullptr).bytes)),
        before(t, cutter.take_bytes(Assignment(t, nullptr).bytes)),
        best(t, cutter.take_bytes(Assignment(t, nullptr).bytes)),
        score(cutter.take<ResidentScore>(1)),
        sources(cutter.take<ResidentSource>((num_members + 1) * kMaxSources)),
        moves(cutter.take<ResidentMove>((num_members + 1) * kMaxTrials)),
        supply(cutter.take<int64_t>(t.num_experts)),
        group_room(cutter.take<int64_t>(t.num_ranks)),
        group(cutter.take<uint32_t>(t.num_ranks)),
        hot(cutter.take<int32_t>(t.num_ranks)),
        imports(cutter.take<int32_t>(t.num_ranks)),
        exports(cutter.take<int32_t>(t.num_ranks)),
        is_exported(cutter.take<int32_t>(t.num_experts)),
        planned_expert(cutter.take<int32_t>(int64_t{t.num_ranks} * t.slots_per_rank)),
        planned_quota(cutter.take<int32_t>(int64_t{t.num_ranks} * t.slots_per_rank)),
        bytes(round_up(cutter.used_bytes(), 8)) {}
};

// The input of a plan on top of residents.
struct ResidentTask {
  const int64_t* load;       // [E]
  const int64_t* rank_load;  // [G] without replicas; padded, if the plan is to be exact
  const int32_t* residents;  // [G, S]
  LocalExperts local_experts;
  int64_t threshold;  // tokens of a rank that are few enough
};

namespace detail {

// A member's sorted list of the first `capacity` values that it is given.
template <class T>
struct TopK {
  T* list;
  int32_t capacity;
  int32_t count = 0;

  UEC_HD void insert(const T& value) {
    if (count == capacity) {
      if (!value.goes_before(list[count - 1])) return;
      --count;
    }
    int32_t at = count++;
    for (; at > 0 && value.goes_before(list[at - 1]); --at) list[at] = list[at - 1];
    list[at] = value;
  }
};

// Merges all members' lists, for all members. Returns how many values there are.
template <class Team, class T>
UEC_HD int32_t merge(Team team, const TopK<T>& own, T* merged) {
  int32_t count = 0, used = 0;
  for (; count < own.capacity; ++count) {
    const bool has_any = used < own.count;
    if (team.min_sync(has_any ? 0 : 1) != 0) break;
    if (holds_min(team, has_any, (has_any ? own.list[used] : T{}).order()))
      merged[count] = own.list[used++];
  }
  team.sync();
  return count;
}

}  // namespace detail

// All members of a team call its functions, and have the same answers.
template <class Team>
class ResidentSearch {
 public:
  // `is_first`: there is no best plan yet; else the one that the scratch has.
  UEC_HD ResidentSearch(const Topology& topology, const ResidentTask& task,
                        const ResidentScratch& scratch, bool is_first)
      : t_(topology),
        task_(task),
        s_(scratch),
        flow_(topology, task.local_experts, scratch.flow),
        local_cells_(team_, static_cast<int32_t>(task.local_experts.max_count)) {
    if (is_first && team_.leader()) *s_.score = {INT64_MAX, 0, 0, 0};
    team_.sync();
  }

  // Keeps the residents, and moves what is needed. Returns whether that will do; if not, a plan
  // from empty slots may be better: with `is_planned` it is in the scratch, and laid over the
  // residents first. (In one function, since a device would have the code of two twice.)
  UEC_HD bool run(bool is_planned) {
    int64_t threshold = task_.threshold;
    if (is_planned) {
      flow_.set_threshold(threshold);
      reset_to_residents();
      if (team_.leader()) overlay_empty_plan();
      team_.sync();
      keep_better();
      const int64_t fullest = s_.score->fullest;
      team_.sync();  // all have looked
      if (fullest <= threshold) return true;
      threshold = fullest;
    }
    return repair(threshold) && s_.score->transfer <= 1;
  }

 private:
  static constexpr int32_t kMaxTrials = ResidentScratch::kMaxTrials;
  static constexpr int32_t kMaxSources = ResidentScratch::kMaxSources;

  UEC_HD int32_t num_slots() const { return t_.num_ranks * t_.slots_per_rank; }
  UEC_HD bool has_moved(int32_t slot) const {
    return s_.now.slot_expert[slot] != task_.residents[slot];
  }
  // What it costs to evict a slot's expert: its load, halved for each other replica; -1: empty.
  UEC_HD int64_t eviction_cost(int32_t slot) const {
    const int32_t e = s_.now.slot_expert[slot];
    return e < 0 ? -1 : task_.load[e] >> min32(s_.now.replicas[e] - 1, 32);
  }
  // The slot of `expert` on the rank whose first slot is `begin`; its last slot + 1 if it has none.
  UEC_HD int32_t slot_of(int32_t expert, int32_t begin) const {
    int32_t i = begin;
    while (i < begin + t_.slots_per_rank && s_.now.slot_expert[i] != expert) ++i;
    return i;
  }

  // Moves what is needed under the threshold. Returns whether there is a way, with the least
  // transfer that has one.
  UEC_HD bool repair(int64_t threshold) {
    flow_.set_threshold(threshold);
    const int32_t last_cap =
        max32(static_cast<int32_t>(task_.local_experts.max_count), t_.slots_per_rank);
    for (int32_t cap = 1; cap < 2 * last_cap; cap = detail::next_cap(cap, t_.slots_per_rank)) {
      for (int32_t retry = 0; retry < 2; ++retry) {
        reset_to_residents();
        if (!move_all(cap, retry == 1)) continue;
        undo_needless();
        empty_slots();
        keep_better();
        return true;
      }
    }
    return false;
  }

  UEC_HD void reset_to_residents() {
    flow_.reset_reach();
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      s_.now.tokens[r] = task_.rank_load[r];
      s_.imports[r] = s_.exports[r] = 0;
    }
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) {
      s_.now.home_quota[e] = static_cast<int32_t>(task_.load[e]);
      s_.now.first_slot[e] = -1;
      s_.now.replicas[e] = 0;
      s_.is_exported[e] = 0;
    }
    for (int32_t i = team_.index(); i < s_.now.num_order(t_); i += team_.size())
      s_.now.order[i] = 0;
    for (int32_t i = team_.index(); i < num_slots(); i += team_.size()) {
      s_.now.slot_quota[i] = 0;
      s_.now.slot_expert[i] = s_.now.next_slot[i] = -1;
    }
    team_.sync();
    if (team_.leader())
      for (int32_t i = num_slots() - 1; i >= 0; --i)
        if (task_.residents[i] >= 0) s_.now.add(i, task_.residents[i]);
    team_.sync();
  }
  // By one member: tokens of the main instance, for a slot that holds the expert.
  UEC_HD void give(int32_t slot, int32_t tokens) const {
    const int32_t e = s_.now.slot_expert[slot];
    s_.now.slot_quota[slot] += tokens;
    s_.now.home_quota[e] -= tokens;
    s_.now.tokens[flow_.rank_of(slot)] += tokens;
    s_.now.tokens[t_.home[e]] -= tokens;
  }
  // By one member. The slot's tokens go home.
  UEC_HD void put(int32_t slot, int32_t expert) const {
    if (s_.now.slot_expert[slot] >= 0) {
      give(slot, -s_.now.slot_quota[slot]);
      s_.now.remove(slot);
    }
    if (expert >= 0) s_.now.add(slot, expert);
  }
  // Returns the home of what was there, or -1 if there was nothing.
  UEC_HD int32_t replace(int32_t slot, int32_t expert) {
    flow_.reset_reach();
    const int32_t old = s_.now.slot_expert[slot];
    team_.sync();  // all have looked
    if (team_.leader()) put(slot, expert);
    team_.sync();
    return old < 0 ? -1 : t_.home[old];
  }
  UEC_HD void restore() {
    flow_.reset_reach();
    s_.now.copy(team_, s_.before);
  }

  // By one member: lays the plan made from empty slots over the residents.
  UEC_HD void overlay_empty_plan() const {
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      const int32_t begin = r * t_.slots_per_rank, end = begin + t_.slots_per_rank;
      for (int32_t i = begin; i < end && s_.planned_expert[i] >= 0; ++i) {
        const int32_t at = slot_of(s_.planned_expert[i], begin);
        if (at < end) give(at, s_.planned_quota[i]);
      }
      for (int32_t i = begin; i < end && s_.planned_expert[i] >= 0; ++i) {
        if (slot_of(s_.planned_expert[i], begin) < end) continue;
        int32_t at = -1;
        for (int32_t to = begin; to < end; ++to)
          if (s_.now.slot_quota[to] == 0 && (at < 0 || eviction_cost(to) < eviction_cost(at)))
            at = to;
        put(at, s_.planned_expert[i]);
        give(at, s_.planned_quota[i]);
      }
    }
  }

  UEC_HD int32_t next_hot_rank(bool fullest_first) const {
    int64_t most = 0;
    int32_t hot = -1;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      const int64_t tokens = s_.now.tokens[r];
      if (tokens <= flow_.threshold()) continue;
      if (hot >= 0 && (fullest_first ? tokens <= most : tokens >= most)) continue;
      most = tokens;
      hot = r;
    }
    const int64_t order = fullest_first ? -most : most;
    const SortKey<3> own{{high_word(order), low_word(order), static_cast<uint32_t>(hot)}};
    return static_cast<int32_t>(
        team_.min_sync(holds_min(team_, hot >= 0, own) ? static_cast<uint32_t>(hot) : ~0u));
  }

  // Relieves one hot rank after the other. A retry begins at the other end, and looks at more
  // experts.
  UEC_HD bool move_all(int32_t cap, bool is_retry) {
    flow_.relieve_all(s_.now);
    for (;;) {
      const int32_t hot = next_hot_rank(is_retry);
      if (hot < 0) return true;
      if (flow_.relieve(s_.now, hot)) continue;
      find_sources(cap, is_retry ? kMaxSources : 1);
      find_groups();
      if (try_moves(cap, true)) continue;
      flow_.relieve(s_.now, hot);  // for its reach
      if (!try_moves(cap, false)) return false;
    }
  }

  // The experts of which ranks in the hot rank's reach have tokens: all who have such tokens, and
  // the home, are in reach.
  UEC_HD void find_sources(int32_t cap, int32_t most) {
    flow_.measure_supply(s_.now);
    num_hot_ = 0;
    int64_t own_excess = 0;
    for (int32_t first = 0; first < flow_.count(); first += team_.size()) {
      const int32_t i = first + team_.index();
      const int64_t excess = i < flow_.count() ? flow_.excess(s_.now, flow_.reached(i)) : 0;
      const MemberCount hot = team_.count(excess > 0);
      if (excess > 0) s_.hot[num_hot_ + hot.before] = flow_.reached(i);
      num_hot_ += hot.all;
      own_excess += excess;
    }
    excess_ = static_cast<int64_t>(team_.sum(static_cast<uint64_t>(own_excess)));
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) s_.supply[e] = 0;
    team_.sync();
    for (int32_t i = team_.index(); i < num_slots(); i += team_.size())
      if (s_.now.slot_quota[i] > 0 && flow_.is_reached(flow_.rank_of(i)))
        team_.atomic_add(s_.supply + s_.now.slot_expert[i],
                         min64(flow_.supply(flow_.rank_of(i)), s_.now.slot_quota[i]));
    team_.sync();
    detail::TopK<ResidentSource> own{s_.sources + team_.index() * kMaxSources, most};
    for (Cells at = local_cells_; at.row < flow_.count(); at.next()) {
      const int32_t rank = flow_.reached(at.row), m = task_.local_experts.begin[rank] + at.column;
      if (m >= task_.local_experts.begin[rank + 1]) continue;
      const int32_t e = task_.local_experts.ids[m];
      if (s_.exports[rank] >= cap && s_.is_exported[e] == 0) continue;
      const int64_t supply = s_.supply[e] + min64(flow_.supply(rank), s_.now.home_quota[e]);
      if (supply == 0) continue;
      own.insert({min64(supply, excess_), task_.load[e] >> min32(2 * s_.now.replicas[e], 32), e});
    }
    num_sources_ = detail::merge(team_, own, sources());
  }
  UEC_HD ResidentSource* sources() const { return s_.sources + team_.size() * kMaxSources; }
  UEC_HD ResidentMove* moves() const { return s_.moves + team_.size() * kMaxTrials; }

  // Ranks that can hand tokens to one another are a group: what one of them takes, all make room
  // for. Its name is its first rank.
  UEC_HD void find_groups() const {
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      s_.group[r] = static_cast<uint32_t>(r);
      s_.group_room[r] = 0;
    }
    team_.sync();
    join_groups(team_);
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      team_.atomic_add(s_.group_room + s_.group[r], max64(flow_.room(s_.now, r), 0));
    team_.sync();
  }
  // Another rank that holds the expert of a slot with tokens, and has tokens of it, too.
  UEC_HD int32_t partner(int32_t slot) const {
    const int32_t e = s_.now.slot_expert[slot];
    if (s_.now.home_quota[e] > 0) return t_.home[e];
    int32_t at = s_.now.first_slot[e];
    while (s_.now.slot_quota[at] == 0) at = s_.now.next_slot[at];
    return flow_.rank_of(at);
  }
  UEC_HD void join_groups(SingleThread) const {
    for (int32_t i = 0; i < num_slots(); ++i) {
      if (s_.now.slot_quota[i] == 0) continue;
      const uint32_t a = group_of(flow_.rank_of(i)), b = group_of(partner(i));
      s_.group[a > b ? a : b] = min_u32(a, b);
    }
    for (int32_t r = 0; r < t_.num_ranks; ++r)
      s_.group[r] = s_.group[s_.group[r]];  // the first rank comes before all others
  }
  UEC_HD uint32_t group_of(uint32_t rank) const {
    while (s_.group[rank] != rank) rank = s_.group[rank] = s_.group[s_.group[rank]];
    return rank;
  }
  // By a team: names spread from rank to rank, until none changes.
  template <class Members>
  UEC_HD void join_groups(Members team) const {
    for (bool changes = true; changes;) {
      changes = false;
      for (int32_t first = 0; first < num_slots(); first += team.size()) {
        const int32_t i = first + team.index();
        uint32_t a = 0, b = 0;
        int32_t rank = 0, other = 0;
        if (i < num_slots() && s_.now.slot_quota[i] > 0) {
          rank = flow_.rank_of(i);
          other = partner(i);
          a = s_.group[rank];
          b = s_.group[other];
        }
        team.sync();  // all have looked
        if (a != b) {
          team.atomic_min(s_.group + (a < b ? other : rank), min_u32(a, b));
          changes = true;
        }
        team.sync();
      }
      changes = team.min_sync(changes ? 0 : 1) == 0;
    }
  }

  // Makes a move that helps the hot rank's reach: the first that does all that is expected of
  // it, of the few that look best, or the one that does most. By groups: what a rank cannot take
  // itself, others of its group may. Returns whether one does help.
  UEC_HD bool try_moves(int32_t cap, bool by_groups) {
    const int32_t count = find_moves(cap, by_groups);
    const int64_t total = flow_.excess(s_.now);
    int64_t most = 0;
    int32_t best = -1;
    s_.before.copy(team_, s_.now);
    for (int32_t i = 0; i < count; ++i) {
      make(moves()[i]);
      const int64_t gain = total - flow_.excess(s_.now);
      if (gain > 0 && gain >= excess_ - moves()[i].left) return record(moves()[i]);
      if (gain > most) {
        most = gain;
        best = i;
      }
      restore();
    }
    if (best < 0) return false;
    make(moves()[best]);
    return record(moves()[best]);
  }
  UEC_HD void make(const ResidentMove& move) {
    const int32_t home = replace(move.slot, move.expert);
    for (int32_t i = 0; i < num_hot_; ++i) flow_.relieve(s_.now, s_.hot[i]);
    if (home >= 0) flow_.relieve(s_.now, home);
  }
  UEC_HD bool record(const ResidentMove& move) const {
    if (team_.leader()) record(move.slot, move.expert);
    team_.sync();
    return true;
  }
  // By one member.
  UEC_HD void record(int32_t slot, int32_t expert) const {
    ++s_.imports[flow_.rank_of(slot)];
    if (s_.is_exported[expert] == 0) ++s_.exports[t_.home[expert]];
    s_.is_exported[expert] = 1;
  }

  // The best come first in moves(). Returns how many there are.
  UEC_HD int32_t find_moves(int32_t cap, bool by_groups) const {
    const int32_t slots = t_.slots_per_rank;
    detail::TopK<ResidentMove> own{s_.moves + team_.index() * kMaxTrials, kMaxTrials};
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      const int64_t room_here = flow_.room(s_.now, r);
      const int64_t shared = by_groups ? s_.group_room[s_.group[r]] : room_here;
      if (shared <= 0 || s_.imports[r] >= cap || flow_.is_reached(r)) continue;
      const int32_t begin = r * slots;
      for (int32_t i = begin; i < begin + slots; ++i) {
        const int32_t old = s_.now.slot_expert[i];
        if (has_moved(i) || (old < 0 && slot_of(-1, begin) < i)) continue;
        // What the resident has taken goes home first, where there may be no room for it.
        const int64_t quota = s_.now.slot_quota[i];
        int64_t back = 0;
        if (quota > 0) back = max64(quota - max64(flow_.room(s_.now, t_.home[old]), 0), 0);
        const int64_t room = max64(room_here + quota, shared);
        for (int32_t k = 0; k < num_sources_; ++k) {
          const ResidentSource& source = sources()[k];
          const auto e = static_cast<int32_t>(source.expert);
          const int64_t gain = min64(source.supply, room);
          const int64_t left = excess_ - gain + back;
          if (own.count == kMaxTrials && left > own.list[own.count - 1].left) continue;
          if (!t_.may_hold(e, r) || is_resident(e, begin)) continue;
          own.insert({left, room - gain + 2 * (quota + eviction_cost(i)), e, i});
        }
      }
    }
    return detail::merge(team_, own, moves());
  }
  UEC_HD bool is_resident(int32_t expert, int32_t begin) const {
    for (int32_t i = begin; i < begin + t_.slots_per_rank; ++i)
      if (task_.residents[i] == expert) return true;
    return false;
  }

  // Later moves may have made earlier ones needless. One with a large quota next to the room that
  // all ranks have hardly ever is, and a search for that would find every rank full.
  UEC_HD void undo_needless() {
    int64_t own_room = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      own_room += flow_.room(s_.now, r);
    const auto room = static_cast<int64_t>(team_.sum(static_cast<uint64_t>(own_room)));
    const auto may_be_needless = [&](int32_t slot) {
      return has_moved(slot) && int64_t{4} * s_.now.slot_quota[slot] <= room;
    };
    for (int32_t i = -1;
         (i = find_first(team_, i + 1, num_slots(), may_be_needless)) < num_slots();) {
      s_.before.copy(team_, s_.now);
      if (!flow_.relieve(s_.now, replace(i, task_.residents[i]))) restore();
    }
  }
  // Residents give their tokens back to homes that have room.
  UEC_HD void empty_slots() const {
    const auto is_needless = [&](int32_t slot) {
      const int32_t quota = s_.now.slot_quota[slot];
      return quota > 0 && !has_moved(slot) &&
             flow_.room(s_.now, t_.home[s_.now.slot_expert[slot]]) >= quota;
    };
    for (int32_t i = -1; (i = find_first(team_, i + 1, num_slots(), is_needless)) < num_slots();) {
      if (team_.leader()) give(i, -s_.now.slot_quota[i]);
      team_.sync();
    }
  }

  UEC_HD void keep_better() {
    const ResidentScore score = score_plan();
    const bool is_better = score.is_better_than(*s_.score);
    team_.sync();  // all have looked
    if (!is_better) return;
    if (team_.leader()) *s_.score = score;
    s_.best.copy(team_, s_.now);
  }
  UEC_HD ResidentScore score_plan() const {
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      s_.imports[r] = s_.exports[r] = 0;
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) s_.is_exported[e] = 0;
    uint32_t instances = 0;
    for (int32_t i = team_.index(); i < num_slots(); i += team_.size())
      instances += s_.now.slot_quota[i] > 0;
    ResidentScore score{0, 0, 0, static_cast<int32_t>(team_.sum(instances))};
    const auto moves = [&](int32_t slot) { return has_moved(slot); };
    for (int32_t i = -1; (i = find_first(team_, i + 1, num_slots(), moves)) < num_slots();) {
      ++score.moves;
      if (team_.leader()) record(i, s_.now.slot_expert[i]);
    }
    team_.sync();
    int64_t fullest = flow_.threshold();
    int32_t transfer = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      fullest = max64(fullest, s_.now.tokens[r]);
      transfer = max32(transfer, max32(s_.imports[r], s_.exports[r]));
    }
    score.fullest = static_cast<int64_t>(highest(team_, static_cast<uint64_t>(fullest)));
    score.transfer = static_cast<int32_t>(highest(team_, static_cast<uint32_t>(transfer)));
    return score;
  }

  const Team team_{};
  const Topology& t_;
  const ResidentTask task_;
  const ResidentScratch s_;
  Flow<Team> flow_;
  const Cells local_cells_;  // rank by rank
  // State of the hot rank's reach:
  int64_t excess_ = 0;
  int32_t num_hot_ = 0, num_sources_ = 0;
};

}  // namespace uec
