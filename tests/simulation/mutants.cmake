# One broken rule each. test_hostile has to catch every one of them.
#
#   mutant(<name> <file> FIND [[...]] REPLACE [[...]])   and more of the same name add up
set(ULTRAEP_MUTANTS "")
if(POLICY CMP0174)
  cmake_policy(SET CMP0174 NEW)  # REPLACE may be empty
endif()
function(mutant name file)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "FIND;REPLACE" "")
  ultraep_mutate(overlay NAME ${name} FILE ${file} FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
  set(ULTRAEP_MUTANTS ${ULTRAEP_MUTANTS} ${name} PARENT_SCOPE)
endfunction()

# ---- delivered is not source-reusable ----------------------------------------------------------

mutant(publish_when_reusable simulation/world.hpp
  FIND [[    if (!world_.delivered(agent_, ticket)) return false;]]
  REPLACE [[    for (uint32_t stage = 0; stage < World::kStages; ++stage)
      if (!world_.reusable(agent_, stage)) return false;]])

# The host's wait for delivery is a store fence.
mutant(sfence_left_out simulation/world.hpp
  FIND [[    if (!world_.delivered(agent_, ticket)) return false;]]
  REPLACE [[]])

mutant(drain_ignores_stores core/stream.hpp
  FIND [[    return mover_.when_delivered(drain_ticket_, true, [](Delivered) {}) ? Step::kFinished
                                                                        : Step::kAwaitDelivered;]]
  REPLACE [[    return Step::kFinished;]])

mutant(drain_ignores_loads core/stream.hpp
  FIND [[    if (stored_ != fetched_) return Step::kAwaitDelivered;
    if (!drain_ticket_)]]
  REPLACE [[    if (!drain_ticket_)]])

mutant(gather_drain_ignores_loads core/gather.hpp
  FIND [[    if (fetched_ && !mover_.loaded(0)) return Step::kAwaitDelivered;]]
  REPLACE [[]])

# ---- publish is a release, observe an acquire --------------------------------------------------

mutant(relaxed_publish simulation/world.cc
  FIND [[  std::copy_n(known, ticks_, message_clock(message));  // release]]
  REPLACE [[]])

mutant(missing_acquire simulation/world.cc
  FIND [[  join_ticks(known, message_clock(message));  // acquire]]
  REPLACE [[]])

mutant(arrival_without_release simulation/world.cc
  FIND [[  join_ticks(shared, clock(agent));  // release]]
  REPLACE [[]])

mutant(arrival_without_acquire simulation/world.cc
  FIND [[  join_ticks(clock(agent), shared);  // acquire]]
  REPLACE [[]])

mutant(publish_before_all_arrivals core/stream.hpp
  FIND [[    if (memory_.arrive(token, &call_.remaining[piece.task]) == 0)]]
  REPLACE [[    if (memory_.arrive(token, &call_.remaining[piece.task]) >= 0)]])

mutant(last_arriver_off_by_one core/stream.hpp
  FIND [[    if (memory_.arrive(token, &call_.remaining[piece.task]) == 0)]]
  REPLACE [[    if (memory_.arrive(token, &call_.remaining[piece.task]) == 1)]])

mutant(claim_is_not_atomic core/stream.hpp
  FIND [[    if (!memory_.claim(&call_.cursor[best], best_at)) return Step::kProgress;]]
  REPLACE [[    memory_.claim(&call_.cursor[best], best_at);]])

# ---- gates -------------------------------------------------------------------------------------

mutant(missing_open core/stream.hpp
  FIND [[    if (verdict != Verdict::kArrived) note(FlagKind::kOpen, rank, p, seen);
    return verdict;]]
  REPLACE [[    return Verdict::kArrived;]])

mutant(home_not_open core/stream.hpp
  FIND [[    if (piece.source == Source::kRemoteMain) {]]
  REPLACE [[    if (false) {]])

mutant(ready_ignored core/stream.hpp
  FIND [[        verdict = group_ready(p, piece, piece.begin + at);]]
  REPLACE [[        verdict = Verdict::kArrived;]])

mutant(digest_unchecked core/protocol.hpp
  FIND [[  if (seen.word == epoch.record.word) return Verdict::kArrived;
  Fault found]]
  REPLACE [[  if (seen.ahead_of(epoch.number) == 0) return Verdict::kArrived;
  Fault found]])

mutant(row_sent_before_the_call core/gather.hpp
  FIND [[      const Verdict verdict = r == call_.rank]]
  REPLACE [[      const Verdict verdict = true]])

mutant(opened_while_in_use simulation/ranks.cc
  FIND [[      announce_call(calls_[rank], memory, mover);]]
  REPLACE [[      announce_call(calls_[rank], memory, mover);
      announce_open(calls_[rank], memory, mover);]])
mutant(opened_while_in_use simulation/ranks.cc
  FIND [[    case Phase::kOpen:
      announce_open(calls_[rank], memory, mover);]]
  REPLACE [[    case Phase::kOpen:]])

# ---- epochs ------------------------------------------------------------------------------------

mutant(epoch_reused simulation/ranks.cc
  FIND [[  call.epoch = {case_.first_epoch + r.call, made.record};]]
  REPLACE [[  call.epoch = {case_.first_epoch + r.call / 2, made.record};]])

mutant(older_epoch_accepted core/protocol.hpp
  FIND [[  if (*seen == epoch.number) return Verdict::kArrived;
  const CallRecord]]
  REPLACE [[  if (*seen != 0) return Verdict::kArrived;
  const CallRecord]])

mutant(epoch_of_32_bits core/protocol.hpp
  FIND [[  if (*seen == epoch.number) return Verdict::kArrived;
  const CallRecord]]
  REPLACE [[  if (static_cast<uint32_t>(*seen) == static_cast<uint32_t>(epoch.number))
    return Verdict::kArrived;
  const CallRecord]])

# ---- progress ----------------------------------------------------------------------------------

# The counter-example: a hub piece is taken first, and waited for with home pieces unclaimed.
mutant(blocked_hub_item_first core/stream.hpp
  FIND [[        verdict = group_ready(p, piece, piece.begin + at);]]
  REPLACE [[        verdict = Verdict::kArrived;]])
mutant(blocked_hub_item_first core/stream.hpp
  FIND [[      if (best < 0 ||
]]
  REPLACE [[      if (best < 0 || piece.source == Source::kSlot ||
]])
mutant(blocked_hub_item_first core/stream.hpp
  FIND [[    const Piece& piece = call_.work.pieces[item_.piece];
    Stage& stage]]
  REPLACE [[    const Piece& piece = call_.work.pieces[item_.piece];
    if (piece.source == Source::kSlot &&
        group_ready(item_.piece, piece, item_.group) != Verdict::kArrived)
      return Step::kBlocked;
    Stage& stage]])

mutant(withheld_before_an_empty_ring core/stream.hpp
  FIND [[      if (mover_.when_delivered(held.ticket, !can_store,]]
  REPLACE [[      if (mover_.when_delivered(held.ticket, false,]])

mutant(blocked_though_finished core/stream.hpp
  FIND [[        live_[--i] = live_[--num_live_];  // else this step could call itself blocked]]
  REPLACE [[]])

mutant(overtaken_worker_blames_the_peer core/stream.hpp
  FIND [[        if (memory_.load(&call_.cursor[p]) < length) return Step::kFailed;]]
  REPLACE [[        return Step::kFailed;]])

mutant(ring_overrun core/stream.hpp
  FIND [[    if (fetched_ - retired_ == kStages) return Step::kAwaitDelivered;]]
  REPLACE [[]])

mutant(stage_reused_too_early core/stream.hpp
  FIND [[    while (retired_ != stored_ && mover_.reusable(retired_ % kStages)) ++retired_;]]
  REPLACE [[    retired_ = stored_;]])

mutant(stored_before_loaded core/stream.hpp
  FIND [[ && mover_.loaded(stored_ % kStages);
    if (published_]]
  REPLACE [[;
    if (published_]])

mutant(held_groups_overwritten core/stream.hpp
  FIND [[held_ - published_ < kMaxHeld &&]]
  REPLACE [[]])

# ---- the end of a call -------------------------------------------------------------------------

mutant(done_to_the_wrong_peer core/stream.hpp
  FIND [[      memory_.publish(token, to.rank, call_.layout.done(to.slot, call_.rank), call_.epoch.number);]]
  REPLACE [[      memory_.publish(token, (to.rank + 1) % call_.num_ranks,
                      call_.layout.done(to.slot, call_.rank), call_.epoch.number);]])

mutant(finished_before_its_own_reads simulation/ranks.cc
  FIND [[    if (!worker_states_[agent_of(rank, w)].stored) {]]
  REPLACE [[    if (!worker_states_[agent_of(rank, w)].fetched) {]])

mutant(done_not_awaited core/call.hpp
  FIND [[      if (verdict == Verdict::kArrived) continue;]]
  REPLACE [[      if (verdict == Verdict::kArrived || done) continue;]])

mutant(pulled_ignored core/call.hpp
  FIND [[      if (verdict == Verdict::kArrived) continue;]]
  REPLACE [[      if (verdict == Verdict::kArrived || !done) continue;]])

mutant(skipped_tail core/tiles.hpp
  FIND [[min64(tile_bytes, bytes[i] - offset)]]
  REPLACE [[min64(tile_bytes, bytes[i] - offset) & ~int64_t{15}]])

mutant(flag_not_read_again core/protocol.hpp
  FIND [[  *seen = memory.observe(offset);
  if (*seen == epoch.number) return Verdict::kArrived;
  *fault = suspicion;]]
  REPLACE [[  *fault = suspicion;]])

# ---- failing -----------------------------------------------------------------------------------

mutant(aborts_unread_before_pulled core/stream.hpp
  FIND [[      if (aborter >= 0) {]]
  REPLACE [[      if (false && aborter >= 0) {]])

mutant(aborts_read_before_the_last_load core/stream.hpp
  FIND [[      mover_.loads_complete();]]
  REPLACE [[]])

mutant(returned_before_the_abort_is_delivered simulation/ranks.cc
  FIND [[  if (!drained || !memories_[own].flags_delivered()) {]]
  REPLACE [[  if (!drained) {]])

mutant(published_after_an_abort core/stream.hpp
  FIND [[        fail(Fault::kAborted);
        return;]]
  REPLACE [[        fail(Fault::kAborted);]])

mutant(no_abort core/call.hpp
  FIND [[        memory.publish(token, r, call.layout.abort(call.rank), word.word);]]
  REPLACE [[        (void)token;]])

mutant(aborts_of_finished_calls_count core/stream.hpp
  FIND [[    if (word.set() && word.ahead_of(epoch.number) <= 0) return r;]]
  REPLACE [[    if (word.set()) return r;]])

mutant(death_unnoticed_before_the_call core/protocol.hpp
  FIND [[    if (!memory.peer_gone(rank)) return Verdict::kWaiting;]]
  REPLACE [[    return Verdict::kWaiting;]])

mutant(death_unnoticed_in_the_call core/protocol.hpp
  FIND [[  if (suspicion == Fault::kNone && memory.peer_gone(rank)) suspicion = Fault::kGone;]]
  REPLACE [[]])

mutant(blames_what_it_waited_for core/failure.hpp
  FIND [[    if (!word.set() || word.told_by() < 0) break;]]
  REPLACE [[    break;]])

mutant(blames_what_it_no_longer_waits_for core/stream.hpp
  FIND [[        wait_ = other;]]
  REPLACE [[]])

mutant(farewell_hides_a_mismatch core/protocol.hpp
  FIND [[  if (seen.kind() == RecordKind::kClosed && ahead <= 0) return Fault::kClosed;]]
  REPLACE [[  if (seen.kind() == RecordKind::kClosed) return Fault::kClosed;]])

list(REMOVE_DUPLICATES ULTRAEP_MUTANTS)
