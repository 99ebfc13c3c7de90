# One broken rule each. test_hostile has to catch every one of them.
#
#   mutant(<name> <file> FIND [[...]] REPLACE [[...]])   and more of the same name add up
function(mutant name file)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "FIND;REPLACE" "")
  ultraep_mutate(simulation NAME ${name} PROGRAM test_hostile FILE ${file}
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

function(_ultraep_simulation_program target program copies)
  get_target_property(parts simulation SOURCES)
  get_target_property(world simulation_world SOURCES)
  list(APPEND parts ${world} ranks.cc)
  list(TRANSFORM parts PREPEND simulation/)
  ultraep_changed_sources(sources ${copies} ${PROJECT_SOURCE_DIR}/tests ${parts})
  add_executable(${target} EXCLUDE_FROM_ALL ${sources})
  ultraep_compile_mutants(${target} ${copies} simulation_pch)
  target_link_libraries(${target} PRIVATE ultraep_core)
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

mutant(drain_ignores_stores core/transfer/storer.hpp
  FIND [[    if (!mover_.wait_delivered(last_ticket_, true, [](Delivered) {})) return Step::kAwaitDelivered;]]
  REPLACE [[]])

mutant(drain_ignores_loads core/transfer/storer.hpp
  FIND [[    if (!mover_.loaded(stored_)) return Step::kAwaitDelivered;]]
  REPLACE [[    if (!mover_.loaded(stored_)) return Step::kFinished;]])

mutant(drain_sleeps_on_a_released_stage core/transfer/worker.hpp
  FIND [[    return fetched == Step::kProgress ? fetched : stored;]]
  REPLACE [[    return stored;]])

mutant(drain_discards_nothing core/transfer/storer.hpp
  FIND [[    if (!ended_) ++stored_;]]
  REPLACE [[]])

mutant(drain_fetches_on core/transfer/fetcher.hpp
  FIND [[    return end() == Step::kFinished ? Step::kProgress : Step::kAwaitDelivered;]]
  REPLACE [[    return step();]])

mutant(gather_drain_ignores_loads core/transfer/gather.hpp
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

mutant(publish_before_all_arrivals core/transfer/storer.hpp
  FIND [[    if (team_.broadcast(arrived) == task.num_groups)]]
  REPLACE [[    if (team_.broadcast(arrived) <= task.num_groups)]])

mutant(last_arriver_off_by_one core/transfer/storer.hpp
  FIND [[    if (team_.broadcast(arrived) == task.num_groups)]]
  REPLACE [[    if (team_.broadcast(arrived) >= task.num_groups - 1)]])

mutant(groups_of_other_tasks_counted core/transfer/fetcher.hpp
  FIND [[      if (call_.work.pieces[p].task != task) continue;]]
  REPLACE [[]])

mutant(arrived_with_groups_left core/transfer/stripe.hpp
  FIND [[    return at + num_workers_ >= Pieces::length(call_, p);]]
  REPLACE [[    return at + 2 * num_workers_ >= Pieces::length(call_, p);]])
mutant(arrived_with_groups_left core/transfer/fetcher.hpp
  FIND [[      left |= !queue_.all_taken(p);]]
  REPLACE [[]])

mutant(given_to_two_workers core/transfer/stripe.hpp
  FIND [[    return ahead < 0 ? ahead + num_workers : ahead;]]
  REPLACE [[    return ahead < 0 ? 0 : ahead;]])

mutant(given_to_no_worker core/transfer/stripe.hpp
  FIND [[      own.next += num_workers_;]]
  REPLACE [[      own.next += num_workers_ + 1;]])

mutant(taken_beyond_the_end core/transfer/stripe.hpp
  FIND [[      if (own.next >= Pieces::length(call_, p)) continue;]]
  REPLACE [[]])

mutant(taken_twice core/transfer/stripe.hpp
  FIND [[        own.movable = (own.movable & QueuedGroups::kAll) >> 1 | QueuedGroups::kOpen;]]
  REPLACE [[        own.movable |= QueuedGroups::kOpen;]])

# Only what the fetch side has acquired itself lets it go on.
mutant(opening_seen_without_acquire simulation/world.cc
  FIND [[  join_ticks(known, message_clock(message));  // acquire]]
  REPLACE [[  const int64_t opening = offset - shape.layout.open(0);
  if (opening < 0 || offset > shape.layout.open(shape.num_ranks - 1))
    join_ticks(known, message_clock(message));]])

# An opening that another worker of the rank has seen orders nothing here.
mutant(opening_shared_by_workers simulation/ranks.cc
  FIND [[    const uec::Stripe stripe{w, workers()};]]
  REPLACE [[    const uec::Stripe stripe{w, workers()};
    uec::StripeScratch shared;
    uec::StripeScratch::cut(scratch_ + agent_of(rank, 0) * scratch_bytes_, call.num_ranks,
                            max_pieces_, &shared);
    scratch.open = shared.open;]])

# ---- gates -------------------------------------------------------------------------------------

mutant(missing_open core/transfer/stripe.hpp
  FIND [[    if (memory_.observe(open) == record) return arrived(memory_, r, open, record);
    const FlagState called =]]
  REPLACE [[    if (memory_.observe(call_.layout.call(r)) == record) return FlagState::kArrived;
    const FlagState called =]])

mutant(call_unseen core/transfer/stripe.hpp
  FIND [[    if (memory_.observe(open) == record) return arrived(memory_, r, open, record);
    const FlagState called =]]
  REPLACE [[    if (memory_.observe(open) >> 32 == record >> 32) return FlagState::kArrived;
    const FlagState called =]])

mutant(openings_not_looked_for core/transfer/stripe.hpp
  FIND [[      scratch_.open[r] = !call.work.needs[r];]]
  REPLACE [[      scratch_.open[r] = 1;]])

mutant(source_not_needed core/schedule/worklist.hpp
  FIND [[        team.set(&w.needs[from]);]]
  REPLACE [[]])

mutant(destination_not_needed core/schedule/worklist.hpp
  FIND [=[    if (s.replica_rank[i] != rank) team.set(&w.needs[s.replica_rank[i]]);]=]
  REPLACE [[]])

mutant(home_not_open core/transfer/fetcher.hpp
  FIND [[    if (piece.source == Source::kRemote && !open[piece.source_rank]) return piece.source_rank;]]
  REPLACE [[]])

mutant(destination_not_open core/transfer/fetcher.hpp
  FIND [[      if (!open[r]) return r;]]
  REPLACE [[]])

mutant(ready_ignored core/transfer/fetcher.hpp
  FIND [[    return check_flag(memory, call.layout.ready(~piece.source_idx, piece.begin + at),]]
  REPLACE [[    if (piece.end >= 0) return FlagState::kArrived;
    return check_flag(memory, call.layout.ready(~piece.source_idx, piece.begin + at),]])

mutant(digest_unchecked core/transfer/protocol.hpp
  FIND [[  if (seen.word == epoch.record.word) return arrived(memory, rank, call_offset, seen.word);
  Fault found]]
  REPLACE [[  if (seen.ahead_of(epoch.number) == 0) return FlagState::kArrived;
  Fault found]])

mutant(row_sent_before_the_call core/transfer/gather.hpp
  FIND [[          r == call_.rank ? FlagState::kArrived]]
  REPLACE [[          true ? FlagState::kArrived]])

mutant(row_published_before_delivered core/transfer/gather.hpp
  FIND [[    if (!mover_.wait_delivered(last_ticket_, true, [&](Delivered token) {]]
  REPLACE [[    if (!mover_.wait_delivered(0, true, [&](Delivered token) {]])

mutant(table_read_before_rows_arrive core/transfer/gather.hpp
  FIND [[      if (state == FlagState::kArrived) continue;
      mine]]
  REPLACE [[      if (true) continue;
      mine]])

mutant(opened_while_in_use simulation/ranks.cc
  FIND [[      announce_call(calls_[rank], memory, mover);]]
  REPLACE [[      announce_call(calls_[rank], memory, mover);
      announce_open(calls_[rank], memory, mover);]])
mutant(opened_while_in_use simulation/ranks.cc
  FIND [[    case Phase::kOpen:
      announce_open(calls_[rank], memory, mover);]]
  REPLACE [[    case Phase::kOpen:]])

# ---- banks -------------------------------------------------------------------------------------

mutant(stale_residents core/transfer/bank.hpp
  FIND [[  const bool same = table.version == version && table.segments == segments;]]
  REPLACE [[  const bool same = table.segments == segments;]])

mutant(filled_slot_sends_its_old_expert core/schedule/schedule.hpp
  FIND [[    return resident[at] >= 0 && resident[at] == slot_expert[at];]]
  REPLACE [[    return resident[at] >= 0;]])

mutant(bank_not_in_the_digest core/transfer/prepare.hpp
  FIND [[  if (args.bank.index < 0) return digest;]]
  REPLACE [[  if (args.bank.index < 1) return digest;]])

mutant(resident_read_while_it_is_filled core/schedule/worklist.hpp
  FIND [[      expect_hubs(Expected::kPulled, x, -1, held);]]
  REPLACE [[      if (held >= 0) expect_hubs(Expected::kPulled, x, -1, held);]])

# ---- epochs ------------------------------------------------------------------------------------

mutant(epoch_reused simulation/ranks.cc
  FIND [[  call.epoch = {case_.first_epoch + r.call, made.record};]]
  REPLACE [[  call.epoch = {case_.first_epoch + r.call / 2, made.record};]])

mutant(older_epoch_accepted core/transfer/protocol.hpp
  FIND [[  if (*seen == epoch.number) return arrived(memory, rank, offset, *seen);
  if constexpr]]
  REPLACE [[  if (*seen != 0) return FlagState::kArrived;
  if constexpr]])

mutant(epoch_of_32_bits core/transfer/protocol.hpp
  FIND [[  if (*seen == epoch.number) return arrived(memory, rank, offset, *seen);
  if constexpr]]
  REPLACE [[  if (static_cast<uint32_t>(*seen) == static_cast<uint32_t>(epoch.number))
    return FlagState::kArrived;
  if constexpr]])

# ---- progress ----------------------------------------------------------------------------------

# The counter-example: a hub piece is taken first, and waited for with home pieces left.
mutant(blocked_hub_item_first core/transfer/stripe.hpp
  FIND [[      if ((own.movable & 1) == 0) continue;]]
  REPLACE [[      if (!(Pieces::is_flagged(call_, p) ? own.is_open() : own.movable & 1)) continue;]])
mutant(blocked_hub_item_first core/transfer/fetcher.hpp
  FIND [[    return progress(at, length(call, p));]]
  REPLACE [[    return call.work.pieces[p].source == Source::kSlot ? 0 : 1 + at;]])
mutant(blocked_hub_item_first core/transfer/fetcher.hpp
  FIND [[queue_(call, memory, scratch, stripe) {]]
  REPLACE [[queue_(call, memory, scratch, stripe), memory_(memory) {]])
mutant(blocked_hub_item_first core/transfer/fetcher.hpp
  FIND [[  bool ended_ = false;
};]]
  REPLACE [[  bool ended_ = false;
  Memory& memory_;
  Fault blocked_ = Fault::kNone;
};]])
mutant(blocked_hub_item_first core/transfer/fetcher.hpp
  FIND [[    stage_.share = tile_ + 1 == end_tile_ ? share() : -1;]]
  REPLACE [[    if (TransferPieces::ready(call_, memory_, stage_.piece,
                              stage_.group - call_.work.pieces[stage_.piece].begin,
                              &blocked_) != FlagState::kArrived)
      return Step::kWaitsForPeer;
    stage_.share = tile_ + 1 == end_tile_ ? share() : -1;]])

mutant(withheld_before_an_empty_ring core/transfer/storer.hpp
  FIND [[publish_next(!can_store)]]
  REPLACE [[publish_next(false)]])

mutant(overtaken_worker_blames_the_peer core/transfer/stripe.hpp
  FIND [[(all_taken(p) || !uses_rank(p, r))]]
  REPLACE [[!uses_rank(p, r)]])

mutant(ring_overrun core/transfer/fetcher.hpp
  FIND [[    const bool vacant = mover_.vacant(fetched_);]]
  REPLACE [[    const bool vacant = true;]])

mutant(end_overruns_the_ring core/transfer/fetcher.hpp
  FIND [[    if (!mover_.vacant(fetched_)) return Step::kAwaitDelivered;
    stage_.piece = -1;]]
  REPLACE [[    stage_.piece = -1;]])

mutant(end_not_sent core/transfer/fetcher.hpp
  FIND [[      if (taken == Step::kFinished) return end();]]
  REPLACE [[]])

mutant(flagged_groups_not_held core/transfer/storer.hpp
  FIND [[(pending.share == 0 && !piece.sets_ready)]]
  REPLACE [[pending.share == 0]])
mutant(ended_with_groups_held core/transfer/storer.hpp
  FIND [[    if (num_published_ != num_stored_) return Step::kAwaitDelivered;]]
  REPLACE [[    if (num_published_ != num_stored_ && !ended_) return Step::kAwaitDelivered;]])

mutant(stage_reused_too_early core/transfer/storer.hpp
  FIND [[    while (released_ != stored_ && mover_.reusable(released_)) mover_.release(released_++);]]
  REPLACE [[    while (released_ != stored_) mover_.release(released_++);]])

mutant(stage_never_released core/transfer/storer.hpp
  FIND [[    while (released_ != stored_ && mover_.reusable(released_)) mover_.release(released_++);]]
  REPLACE [[]])

mutant(stored_before_loaded simulation/world.hpp
  FIND [[ && (stage(k).ends_stream() || world_.loaded(agent_, k % kStages));]]
  REPLACE [[;]])

mutant(held_groups_overwritten core/transfer/storer.hpp
  FIND [[num_stored_ - num_published_ >= kMaxUnpublished || ]]
  REPLACE [[]])

# ---- the end of a call -------------------------------------------------------------------------

mutant(done_to_the_wrong_peer core/transfer/storer.hpp
  FIND [[      memory_.publish(token, to.rank, call_.layout.done(to.slot, call_.rank), call_.epoch.number);]]
  REPLACE [[      memory_.publish(token, (to.rank + 1) % call_.num_ranks,
                      call_.layout.done(to.slot, call_.rank), call_.epoch.number);]])

mutant(finished_before_its_own_reads simulation/ranks.cc
  FIND [[    if (!worker_states_[agent_of(rank, w)].stored) {]]
  REPLACE [[    if (!worker_states_[agent_of(rank, w)].fetched) {]])

mutant(done_not_awaited core/transfer/announce.hpp
  FIND [[    if (state == FlagState::kArrived) return kAll;]]
  REPLACE [[    if (state == FlagState::kArrived || e.kind == Expected::kDone) return kAll;]])

mutant(pulled_ignored core/transfer/announce.hpp
  FIND [[    if (state == FlagState::kArrived) return kAll;]]
  REPLACE [[    if (state == FlagState::kArrived || e.kind == Expected::kPulled) return kAll;]])

mutant(skipped_tail core/schedule/tiles.hpp
  FIND [[min64((end - tile) * tile_bytes, bytes[i] - offset)]]
  REPLACE [[min64((end - tile) * tile_bytes, bytes[i] - offset) & ~int64_t{15}]])

mutant(flag_not_read_again core/transfer/protocol.hpp
  FIND [[  *seen = memory.observe(offset);
  if (*seen == epoch.number) return arrived(memory, rank, offset, *seen);
  *fault = suspicion;]]
  REPLACE [[  *fault = suspicion;]])

# ---- failing -----------------------------------------------------------------------------------

mutant(aborts_unread_before_pulled core/transfer/storer.hpp
  FIND [[      if (aborter >= 0) {]]
  REPLACE [[      if (false && aborter >= 0) {]])

mutant(aborts_read_before_the_last_load core/transfer/storer.hpp
  FIND [[      mover_.loads_complete();]]
  REPLACE [[]])

mutant(returned_before_the_abort_is_delivered simulation/ranks.cc
  FIND [[  if (!drained || !memories_[own].flags_delivered()) {]]
  REPLACE [[  if (!drained) {]])

mutant(published_after_an_abort core/transfer/storer.hpp
  FIND [[        fault_ = Fault::kAborted;
        return;]]
  REPLACE [[        fault_ = Fault::kAborted;]])

mutant(no_abort core/transfer/announce.hpp
  FIND [[        memory.publish(token, r, call.layout.abort(call.rank), word.word);]]
  REPLACE [[        (void)token;]])

mutant(aborts_of_finished_calls_count core/transfer/protocol.hpp
  FIND [[return set() && ahead_of(epoch) <= 0;]]
  REPLACE [[return set();]])

mutant(death_unnoticed_before_the_call core/transfer/protocol.hpp
  FIND [[    if (!memory.peer_gone(rank)) return FlagState::kWaiting;]]
  REPLACE [[    return FlagState::kWaiting;]])

mutant(death_unnoticed_in_the_call core/transfer/protocol.hpp
  FIND [[  if (suspicion == Fault::kNone && memory.peer_gone(rank)) suspicion = Fault::kGone;]]
  REPLACE [[]])

mutant(blames_what_it_waited_for engine/cause.hpp
  FIND [[    if (!word.set() || word.aborted_by() < 0) break;]]
  REPLACE [[    break;]])

mutant(names_nobody core/transfer/stripe.hpp
  FIND [[      if (p < num_pieces()) wait = make_wait(p, unopened);]]
  REPLACE [[]])

mutant(farewell_hides_a_mismatch core/transfer/protocol.hpp
  FIND [[  if (seen.kind() == RecordKind::kClosed && ahead <= 0) return Fault::kClosed;]]
  REPLACE [[  if (seen.kind() == RecordKind::kClosed) return Fault::kClosed;]])

# ---- a reduction: what is read ------------------------------------------------------------------

mutant(sum_read_early core/transfer/reducer.hpp
  FIND [[    if (r.of_hub) {
      // Rule]]
  REPLACE [[    if (r.of_hub) return FlagState::kArrived;
    if (r.of_hub) {
      // Rule]])

mutant(sum_published_when_stored simulation/adder.hpp
  FIND [[    if (!world_.delivered(agent_, ticket)) return false;]]
  REPLACE [[]])

mutant(sources_not_open core/transfer/reducer.hpp
  FIND [[      if (!open[rank]) return rank;]]
  REPLACE [[]])

mutant(summed_before_the_home_opens core/transfer/reducer.hpp
  FIND [[    return r.kind == Reduction::kSum && !open[r.home] ? r.home : -1;]]
  REPLACE [[    return -1;]])

mutant(sums_taken_in_any_order core/transfer/reducer.hpp
  FIND [[return piece(call, p).of_hub; }]]
  REPLACE [[return false; }]])

mutant(first_sum_vouches_for_all core/transfer/stripe.hpp
  FIND [[flagged ? 1 << i : QueuedGroups::kAll]]
  REPLACE [[own.movable & 1 ? 0 : QueuedGroups::kAll]])

# ---- a reduction: what is added up --------------------------------------------------------------

mutant(parts_in_another_order core/transfer/reducer.hpp
  FIND [=[return in_slot(from[i], span); };]=]
  REPLACE [=[return in_slot(from[r.count - 1 - i], span); };]=])

mutant(own_part_left_out core/transfer/reducer.hpp
  FIND [[        adder_.sum(in_sums(r, {call_.rank, r.idx}, span, tile), r.count, slot, elements, type);]]
  REPLACE [=[        adder_.sum(in_sums(r, {call_.rank, r.idx}, span, tile), r.count - 1,
                   [&](int32_t i) { return slot(i + (from[i].rank >= call_.rank)); }, elements,
                   type);]=])

mutant(a_part_added_twice core/transfer/reducer.hpp
  FIND [[        adder_.sum(in_sums(r, {call_.rank, r.idx}, span, tile), r.count, slot, elements, type);]]
  REPLACE [=[        adder_.sum(in_sums(r, {call_.rank, r.idx}, span, tile), r.count + 1,
                   [&](int32_t i) { return slot(i % r.count); }, elements, type);]=])

mutant(sums_of_slots_in_one_place core/transfer/layout.hpp
  FIND [[{ return sums_base + slot * sums_bytes; }]]
  REPLACE [[{ return sums_base; }]])

mutant(sums_beyond_their_range core/transfer/reducer.hpp
  FIND [[    const int64_t nth = tile - r.tile;]]
  REPLACE [[    const int64_t nth = tile;]])

mutant(ranges_overlap core/schedule/reduce_worklist.hpp
  FIND [[      cut(x, own, &sum);]]
  REPLACE [[      cut(x, own, &sum);
      sum.tile -= sum.begin > 0 ? sum.group_tiles : 0;
      sum.begin -= sum.begin > 0;]])

mutant(mode_left_out_of_the_digest core/transfer/prepare.hpp
  FIND [[static_cast<uint64_t>(mode) << 1 | args.zero]]
  REPLACE [[args.zero]])

mutant(zero_left_out_of_the_digest core/transfer/prepare.hpp
  FIND [[ << 1 | args.zero);]]
  REPLACE [[ << 1);]])

# ---- a reduction: who has read ------------------------------------------------------------------

mutant(cleared_early core/transfer/reducer.hpp
  FIND [[    for (int32_t i = 0; i < r.count; ++i) {
      const Expected& reader]]
  REPLACE [[    for (int32_t i = 0; false && i < r.count; ++i) {
      const Expected& reader]])

mutant(cleared_before_the_home_has_read core/schedule/reduce_worklist.hpp
  FIND [[false,  first_reader, num_expected - first_reader};]]
  REPLACE [[false,  first_reader + 1, num_expected - first_reader - 1};]])

mutant(cleared_before_the_hubs_have_read core/schedule/reduce_worklist.hpp
  FIND [[false,  first_reader, num_expected - first_reader};]]
  REPLACE [[false,  first_reader, 1};]])

mutant(consumed_not_awaited core/transfer/announce.hpp
  FIND [[    if (state == FlagState::kArrived) return kAll;]]
  REPLACE [[    if (state == FlagState::kArrived || e.kind == Expected::kConsumed) return kAll;]])

mutant(consumed_before_the_last_group core/transfer/reducer.hpp
  FIND [[    if (r.end - pending.group > num_workers_) return;]]
  REPLACE [[]])

mutant(consumed_without_the_other_workers core/transfer/reducer.hpp
  FIND [=[arrived = memory_.arrive(token, &call_.arrived[pending.piece], 1);]=]
  REPLACE [=[arrived = ++call_.arrived[pending.piece];]=])

mutant(consumed_of_two_epochs core/transfer/reducer.hpp
  FIND [[        memory_.publish(token, slot.rank, call_.layout.consumed(slot.slot, call_.rank),
                        call_.epoch.number);]]
  REPLACE [[        memory_.publish(token, slot.rank, call_.layout.consumed(slot.slot, call_.rank),
                        call_.epoch.number | 1);]])
mutant(consumed_of_two_epochs core/transfer/reducer.hpp
  FIND [[                     call.layout.call(reader.peer), reader.peer, call.epoch, fault, &seen);]]
  REPLACE [[                     call.layout.call(reader.peer), reader.peer,
                     Epoch{call.epoch.number | 1, call.epoch.record}, fault, &seen);]])
mutant(consumed_of_two_epochs core/transfer/announce.hpp
  FIND [[                                       call_.epoch, fault, &seen);]]
  REPLACE [[                                       Epoch{call_.epoch.number |
                                                 (e.kind == Expected::kConsumed), call_.epoch.record},
                                       fault, &seen);]])

# The caller has its slots back, and they are not yet cleared.
mutant(finished_before_slots_are_cleared core/transfer/reducer.hpp
  FIND [[      if (adder_.try_delivered(pending.ticket,]]
  REPLACE [[      if (call_.work.reductions[pending.piece].kind == Reduction::kZero) {
        ++num_published_;
        return Step::kProgress;
      }
      if (adder_.try_delivered(pending.ticket,]])

# ---- a reduction: progress and failing ----------------------------------------------------------

mutant(source_that_disagrees_unnoticed core/transfer/reducer.hpp
  FIND [[      if (call.work.destinations[r.first + i].rank == rank) return true;]]
  REPLACE [[      if (false) return true;]])

mutant(home_that_disagrees_unnoticed core/transfer/reducer.hpp
  FIND [[    return r.kind == Reduction::kSum && r.home == rank;]]
  REPLACE [[    return false;]])

# The counter-example turned round: a home's piece is taken first, and waited for with sums of its
# own left.
mutant(blocked_home_item_first core/transfer/reducer.hpp
  FIND [[    return static_cast<uint32_t>(piece(call, p).kind) << 8 |]]
  REPLACE [[    return static_cast<uint32_t>(piece(call, p).kind ^ 1) << 8 |]])
mutant(blocked_home_item_first core/transfer/stripe.hpp
  FIND [[      if ((own.movable & 1) == 0) continue;]]
  REPLACE [[      if (!(call_.work.num_reductions > 0 && Pieces::is_flagged(call_, p)
                ? own.is_open()
                : own.movable & 1))
        continue;]])
mutant(blocked_home_item_first core/transfer/reducer.hpp
  FIND [=[    do_tiles(call_.work.reductions[piece_]);]=]
  REPLACE [=[    if (ReductionPieces::waits(call_, piece_) &&
        ReductionPieces::ready(call_, memory_, piece_,
                               group_ - call_.work.reductions[piece_].begin, &fault_) !=
            FlagState::kArrived)
      return Step::kWaitsForPeer;
    do_tiles(call_.work.reductions[piece_]);]=])

mutant(aborts_unread_by_the_home core/transfer/reducer.hpp
  FIND [[      if (aborter_ >= 0) {]]
  REPLACE [[      if (false) {]])

mutant(aborts_read_before_the_last_part core/transfer/reducer.hpp
  FIND [[      adder_.loads_complete();]]
  REPLACE [[]])

mutant(reducer_drain_ignores_stores core/transfer/reducer.hpp
  FIND [=[    return adder_.try_delivered(adder_.ticket(), [](Delivered) {}) ? Step::kFinished
                                                                   : Step::kAwaitDelivered;]=]
  REPLACE [[    return Step::kFinished;]])

ultraep_add_mutants(simulation _ultraep_simulation_program --mutant)
