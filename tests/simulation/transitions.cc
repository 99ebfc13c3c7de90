// What may happen next.
#include "simulation/ranks.hpp"

namespace sim {

void Simulation::list(std::vector<Transition>& out) {
  out.clear();
  const int32_t num_ranks = case_.group.num_ranks;
  const uint8_t* const asleep = world_->asleep;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const Rank& r = ranks_[rank];
    if (r.stopped) continue;
    const int32_t own = own_thread(rank);
    if (!asleep[2 * own] && r.phase < Phase::kClosed) out.push_back({Transition::kProgram, rank});
    for (int32_t w = 0; w < workers(); ++w) {
      const int32_t agent = agent_of(rank, w);
      const WorkerState& state = worker_states_[agent];
      if (working(r)) {
        if (!(state.reduces ? state.stored : state.fetched) && !asleep[2 * agent])
          out.push_back({Transition::kFetch, agent});
        if (!state.stored && !state.reduces && !asleep[2 * agent + 1])
          out.push_back({Transition::kStore, agent});
      } else if (draining(r) && !state.drained && !(state.reduces && state.stored)) {
        if (!asleep[2 * agent]) out.push_back({Transition::kFetch, agent});
        if (!asleep[2 * agent + 1] && !state.noticed && !state.stored && !state.reduces)
          out.push_back({Transition::kStore, agent});
      }
    }
  }
  for (int32_t i = 0; i < world_->num_operations(); ++i) out.push_back({Transition::kOperation, i});
  for (int32_t i = 0; i < world_->num_pending_flags(); ++i)
    out.push_back({Transition::kShow, world_->pending_flag(i)});
  if (stops_somebody()) {
    const Rank& culprit = ranks_[case_.culprit];
    if (culprit.stopped && case_.ending == Ending::kDies)
      for (int32_t rank = 0; rank < num_ranks; ++rank)
        if (rank != case_.culprit && !world_->gone[rank * num_ranks + case_.culprit] &&
            world_->all_shown(case_.culprit, rank))
          out.push_back({Transition::kNotice, rank * num_ranks + case_.culprit});
  }
  // A rank waits for the words of others for half a second: long enough for them to come, unless
  // its own clock is far ahead of everybody's.
  if (out.empty() || case_.ending == Ending::kImpatient)
    for (int32_t rank = 0; rank < num_ranks; ++rank)
      if (ranks_[rank].phase == Phase::kChain && !ranks_[rank].stopped && !ranks_[rank].gave_up)
        out.push_back({Transition::kGiveUp, rank});
  for (int32_t agent = 0; agent < world_->num_agents(); ++agent) {
    if (!can_time_out(agent)) continue;
    // A clock runs out when nothing has happened for long; those of others then soon do as well.
    // A death is seen without a clock.
    const bool due = case_.ending == Ending::kStops
                         ? out.empty() || *clock_ran_out_
                         : case_.ending == Ending::kImpatient && !*clock_ran_out_ &&
                               world_->rank_of(agent) == case_.culprit &&
                               ranks_[case_.culprit].call >= case_.at_call;
    if (due) out.push_back({Transition::kTimeout, agent});
  }
  if (stops_somebody()) {
    const Rank& culprit = ranks_[case_.culprit];
    if (!culprit.stopped && culprit.call >= case_.at_call && culprit.phase < Phase::kAbort)
      out.push_back({Transition::kStop, case_.culprit});
  }
}

// Independent of everything else are
// - steps of a rank's own thread that look at no flag: a publish only adds to what may be seen;
// - a worker that has nothing left to take: it waits for its bytes, and publishes;
// - a reducer that has a group in hand: it adds up the rest, waits for it to arrive, and publishes;
// - flags that reach a rank that has closed.
// Whether two accesses race is told by clocks, and so is the same in both orders. There are no
// cycles: every step moves something that never moves back.
void Simulation::reduce(std::vector<Transition>& possible) const {
  if (case_.ending != Ending::kSuccess || workers() != 1) return;
  for (const Transition& t : possible) {
    const bool show = t.kind == Transition::kShow;
    if (!show && t.kind != Transition::kProgram) continue;
    const Phase phase = ranks_[show ? world_->flag_rank(t.index) : t.index].phase;
    const bool alone = show ? phase == Phase::kClosed
                            : phase == Phase::kAnnounce || phase == Phase::kStart ||
                                  phase == Phase::kOpen || phase == Phase::kReturn;
    if (!alone) continue;
    possible = {Transition{t}};
    return;
  }
  for (int32_t agent = 0; agent < world_->num_agents(); ++agent) {
    const WorkerState& state = worker_states_[agent];
    const bool holds = state.reduces ? world_->holds_stores(agent) : state.fetched != 0;
    if (!holds || state.stored) continue;
    std::vector<Transition> own;
    for (const Transition& t : possible)
      if ((t.kind == Transition::kStore && t.index == agent) ||
          (t.kind == Transition::kFetch && t.index == agent && world_->delivered_all(agent)) ||
          (t.kind == Transition::kOperation && world_->operation(t.index).agent == agent))
        own.push_back(t);
    if (state.reduces && own.size() > 1) own.resize(1);  // in any order
    if (own.empty()) continue;
    possible = std::move(own);
    return;
  }
}

bool Simulation::can_time_out(int32_t agent) const {
  const Rank& r = ranks_[world_->rank_of(agent)];
  const bool blocked = worker_states_[agent].blocked && world_->asleep[2 * agent];
  // A rank that aborts without a fault can do so at any time.
  if (r.stopped || !(blocked || case_.ending == Ending::kImpatient)) return false;
  const bool own = agent == own_thread(world_->rank_of(agent));
  return own ? r.phase == Phase::kFinish : working(r) && !worker_states_[agent].stored;
}

void Simulation::take(const Transition& t) {
  switch (t.kind) {
    case Transition::kFetch:
    case Transition::kStore:
      step_worker(t.index, t.kind == Transition::kFetch);
      break;
    case Transition::kProgram:
      step_program(t.index);
      break;
    case Transition::kOperation:
      world_->advance(t.index);
      break;
    case Transition::kShow:
      world_->show(t.index);
      break;
    case Transition::kStop:
      ranks_[t.index].stopped = 1;
      world_->lose_peer_state(t.index);
      break;
    case Transition::kNotice:
      world_->gone[t.index] = 1;
      world_->wake_rank(t.index / case_.group.num_ranks);
      break;
    case Transition::kGiveUp:
      ranks_[t.index].gave_up = 1;
      world_->wake_agent(own_thread(t.index));
      break;
    case Transition::kTimeout:
      time_out(t.index);
      break;
  }
}

}  // namespace sim
