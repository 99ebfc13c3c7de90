# Rules of the device's half, each broken in a program of its own that must not pass: the emulated
# device, ThreadSanitizer or a check has to notice.
#
# Not here, because the emulation does without: fences of shared memory between the proxies, what a
# shuffle does not order, and fence_system(). tests/litmus/ has these.

# ultraep_add_device_mutant(<name> [HANGS] [PROGRAM <test>] FILE <path> FIND [[...]] REPLACE [[...]])
#
# PROGRAM is the name of a test in this folder; test_replicate if none is given.
function(ultraep_add_device_mutant name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HANGS" "PROGRAM;FILE;FIND;REPLACE" "")
  if(NOT DEFINED arg_PROGRAM)
    set(arg_PROGRAM test_replicate)
  endif()
  set(watchdog "")
  if(arg_HANGS)
    set(watchdog WATCHDOG 10)
  endif()
  ultraep_mutate(device NAME ${name} PROGRAM ${arg_PROGRAM} ${watchdog} FILE "${arg_FILE}"
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

function(_ultraep_device_program target program copies)
  add_executable(${target} EXCLUDE_FROM_ALL device/${program}.cc)
  target_include_directories(${target} BEFORE PRIVATE ${copies}/device/emulation device/emulation)
  ultraep_compile_mutants(${target} ${copies} mutants_std)
  target_link_libraries(${target} PRIVATE ultraep_host)
endfunction()

# ---- delivered, reusable, proxies ----------------------------------------------------------------

ultraep_add_device_mutant(device_delivered_is_reusable FILE cuda/device/mover.cuh
  FIND [[        return ptx::bulk_wait<0>();]]
  REPLACE [[        return ptx::bulk_wait_read<0>();]])

ultraep_add_device_mutant(device_waits_for_too_few FILE cuda/device/mover.cuh
  FIND [[wait_for_all_but(behind < kCommitsInFlight ? behind : kCommitsInFlight);]]
  REPLACE [[wait_for_all_but(kCommitsInFlight);]])

ultraep_add_device_mutant(device_publish_without_proxy_fence FILE cuda/device/mover.cuh
  FIND [[      // Bulk stores and the release that will publish them are of different proxies.
      ptx::fence_proxy_async_global();]]
  REPLACE [[]])

ultraep_add_device_mutant(device_one_lane_fences_for_all FILE cuda/device/mover.cuh
  FIND [[      // Bulk stores and the release that will publish them are of different proxies.
      ptx::fence_proxy_async_global();]]
  REPLACE [[      if (Warp::leader()) ptx::fence_proxy_async_global();]])

ultraep_add_device_mutant(device_one_lane_waits_for_all FILE cuda/device/mover.cuh
  FIND [[      wait_for_all_but(behind]]
  REPLACE [[      if (Warp::leader()) wait_for_all_but(behind]])

ultraep_add_device_mutant(device_load_without_proxy_fence FILE cuda/device/mover.cuh
  FIND [[      ptx::fence_proxy_async_global();
      ptx::mbarrier_arrive_expect]]
  REPLACE [[      ptx::mbarrier_arrive_expect]])

ultraep_add_device_mutant(device_store_without_proxy_fence FILE cuda/device/mover.cuh
  FIND [[    ptx::fence_proxy_async_global();
    return true;]]
  REPLACE [[    return true;]])

ultraep_add_device_mutant(device_one_lane_fences_its_stores FILE cuda/device/mover.cuh
  FIND [[    ptx::fence_proxy_async_global();
    return true;]]
  REPLACE [[    if (Warp::leader()) ptx::fence_proxy_async_global();
    return true;]])

# ---- the ring ------------------------------------------------------------------------------------

ultraep_add_device_mutant(device_stage_reused_while_read FILE cuda/device/mover.cuh
  FIND [[    ptx::bulk_wait_read<1>();]]
  REPLACE [[]])

ultraep_add_device_mutant(device_last_stage_reused_while_read FILE cuda/device/mover.cuh
  FIND [[    read_ = commits_ - 1;]]
  REPLACE [[    read_ = commits_;]])

ultraep_add_device_mutant(device_ring_overrun FILE cuda/device/mover.cuh
  FIND [[    return k < kStages || is_complete(]]
  REPLACE [[    return true || is_complete(]])

ultraep_add_device_mutant(device_stored_before_loaded HANGS FILE cuda/device/mover.cuh
  FIND [[      ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(in_bulk));]]
  REPLACE [[      ptx::mbarrier_arrive(full);]])

ultraep_add_device_mutant(device_described_too_late FILE cuda/device/mover.cuh
  FIND [[    if (Warp::leader()) ring_.stages[k % kStages] = stage;
    ptx::sync_warp();]]
  REPLACE [[    ptx::sync_warp();
    if (!Warp::leader()) ring_.stages[k % kStages] = stage;]])

ultraep_add_device_mutant(device_tail_left_out FILE cuda/device/mover.cuh
  FIND [[ptx::ballot(any && in_bulk < bytes)]]
  REPLACE [[ptx::ballot(any && in_bulk == 0)]])

# ---- workers of a block --------------------------------------------------------------------------

ultraep_add_device_mutant(device_workers_share_tiles FILE cuda/device/replicate.cuh
  FIND [[worker * kNumStages * shared.block.call.tiles.tile_bytes;]]
  REPLACE [[0 * kNumStages * shared.block.call.tiles.tile_bytes;]])

ultraep_add_device_mutant(device_workers_share_scratch FILE cuda/device/replicate.cuh
  FIND [[kScratchAt + worker * bytes,]]
  REPLACE [[kScratchAt,]])

# ---- blocks of a rank ----------------------------------------------------------------------------

ultraep_add_device_mutant(device_counters_relaxed FILE device/emulation/cuda/device/ptx.cuh
  FIND [[fetch_add(value, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(value, std::memory_order_relaxed)]])

ultraep_add_device_mutant(device_tables_used_before_filled FILE cuda/device/call.cuh
  FIND [[shared_memory + sizeof(shared));
  ptx::sync_block();]]
  REPLACE [[shared_memory + sizeof(shared));]])

ultraep_add_device_mutant(device_tables_without_bound FILE cuda/device/call.cuh
  FIND [[shared.header.bytes <= kNearbyBytes]]
  REPLACE [[true]])

ultraep_add_device_mutant(device_tickets_not_reset FILE cuda/device/call.cuh
  FIND [[  state.entered = 0;
]]
  REPLACE [[]])

ultraep_add_device_mutant(device_epoch_not_advanced FILE cuda/device/call.cuh
  FIND [[      state.epoch = block.call.epoch.number;]]
  REPLACE [[]])

ultraep_add_device_mutant(device_every_block_ends_the_call FILE cuda/device/call.cuh
  FIND [[== ptx::num_blocks_x() - 1;]]
  REPLACE [[>= 0;]])

ultraep_add_device_mutant(device_peers_unchecked FILE cuda/device/call.cuh
  FIND [[  if (early.fault != Fault::kNone)]]
  REPLACE [[  if (false)]])

ultraep_add_device_mutant(device_late_block_begins FILE cuda/device/replicate.cuh
  FIND [[may_begin(block, memory)]]
  REPLACE [[true]])

ultraep_add_device_mutant(reduce_late_block_begins PROGRAM test_reduce FILE cuda/device/reduce.cuh
  FIND [[may_begin(block, memory)]]
  REPLACE [[true]])

ultraep_add_device_mutant(device_members_out_of_step FILE core/transfer/stripe.hpp
  FIND [[    return (both & 0xFFFF) != 0;]]
  REPLACE [[    return waits;]])

# ---- failing -------------------------------------------------------------------------------------

ultraep_add_device_mutant(device_clock_never_put_back FILE cuda/device/wait.cuh
  FIND [[return now > from ? now - from : 0; }]]
  REPLACE [[return now - from; }]])

ultraep_add_device_mutant(device_clock_ignored HANGS FILE cuda/device/wait.cuh
  FIND [[    if (fault == Fault::kNone && waited != 0) fault = Fault::kTimeout;]]
  REPLACE [[]])

ultraep_add_device_mutant(device_cancel_ignored HANGS FILE cuda/device/wait.cuh
  FIND [[    if (i % kStepsPerLongPoll == 0 && is_cancelled(block)) fault = Fault::kCancelled;]]
  REPLACE [[]])

ultraep_add_device_mutant(device_cancelled_before_unseen FILE cuda/device/call.cuh
  FIND [[    if (shared.polls_cancel && is_cancelled(known.status)) {]]
  REPLACE [[    if (false) {]])

ultraep_add_device_mutant(device_store_side_left_waiting HANGS FILE cuda/device/replicate.cuh
  FIND [[  while (fetcher.drain_step() != Step::kFinished) ptx::pause();]]
  REPLACE [[]])

ultraep_add_device_mutant(device_slots_given_up_first FILE cuda/device/mover.cuh
  FIND [[full, reads_main(source));]]
  REPLACE [[full, true);]])

# ---- far peers -----------------------------------------------------------------------------------

ultraep_add_device_mutant(device_network_asked_about_near_flags FILE cuda/device/memory.cuh
  FIND [[      if (is_far(rank)) far::acquire(flag(offset), seen);]]
  REPLACE [[      far::acquire(flag(offset), seen);]])

ultraep_add_device_mutant(device_far_flag_overtakes_its_bytes FILE cuda/device/mover.cuh
  FIND [[        far::fence();]]
  REPLACE [[]])

ultraep_add_device_mutant(device_far_puts_not_awaited FILE cuda/device/mover.cuh
  FIND [[      if constexpr (kFar) far::quiet();
      delivered_]]
  REPLACE [[      delivered_]])

ultraep_add_device_mutant(device_far_tiles_reused_too_early FILE cuda/device/mover.cuh
  FIND [[        if (ring_.far_stages % kNumFarStages == 0) far::quiet();  // all of them are free again]]
  REPLACE [[]])

ultraep_add_device_mutant(device_far_record_overtakes_flags FILE cuda/device/call.cuh
  FIND [[  if constexpr (Memory::kFar) far::quiet();

  ptx::sync_block();]]
  REPLACE [[  ptx::sync_block();]])

# ---- plans on the device -------------------------------------------------------------------------

ultraep_add_device_mutant(device_block_published_before_all_have_copied FILE cuda/device/prepare.cuh
  FIND [[  ptx::fence_proxy_async_shared();
  ptx::sync_block();]]
  REPLACE [[  ptx::fence_proxy_async_shared();]])

ultraep_add_device_mutant(device_block_not_released FILE cuda/device/prepare.cuh
  FIND [[ptx::store_release_device(&state.prepared, shared.block.call.epoch.number);]]
  REPLACE [[state.prepared = shared.block.call.epoch.number;]])

ultraep_add_device_mutant(device_block_not_awaited FILE cuda/device/prepare.cuh
  FIND [[  while (ptx::load_acquire_device(&state.prepared) != epoch) {]]
  REPLACE [[  while (epoch == 0) {]])

ultraep_add_device_mutant(device_block_of_the_last_call FILE cuda/device/prepare.cuh
  FIND [[  while (ptx::load_acquire_device(&state.prepared) != epoch) {]]
  REPLACE [[  while (ptx::load_acquire_device(&state.prepared) + 1 < epoch) {]])

ultraep_add_device_mutant(device_refusal_not_told HANGS FILE cuda/device/prepare.cuh
  FIND [[    reject(shared.block, memory, refusal);]]
  REPLACE [[]])

ultraep_add_device_mutant(device_counters_not_reset HANGS FILE cuda/device/call_block.hpp
  FIND [[arrived[i] = 0;]]
  REPLACE [[continue;]])

ultraep_add_device_mutant(device_block_packed_before_made FILE cuda/device/prepare.cuh
  FIND [[  ptx::sync_block();
  Wait missing;]]
  REPLACE [[  Wait missing;]])

ultraep_add_device_mutant(device_arguments_used_before_gathered FILE cuda/device/prepare.cuh
  FIND [[  ptx::sync_block();
  if (!prepared) return refusal;]]
  REPLACE [[  ptx::sync_warp();
  if (!prepared) return refusal;]])

ultraep_add_device_mutant(device_replay_counted FILE cuda/device/call.cuh
  FIND [[      state.last_call = shared.known.last_call + has_call_number;]]
  REPLACE [[      state.last_call = shared.known.last_call + 1;]])

# ---- what slots hold -----------------------------------------------------------------------------

ultraep_add_device_mutant(device_bank_not_noted PROGRAM test_banks FILE cuda/device/prepare.cuh
  FIND [[    note_residents(Warp{},]]
  REPLACE [[    if (false) note_residents(Warp{},]])

ultraep_add_device_mutant(device_bank_not_expired PROGRAM test_banks FILE cuda/device/prepare.cuh
  FIND [[  expire_residents(Warp{}, topology_of(known), table.version, segments, table);]]
  REPLACE [[  if (table.segments == segments) return table.resident;
  if (Warp::leader()) table.segments = segments;]])

ultraep_add_device_mutant(device_bank_not_in_digest PROGRAM test_banks FILE cuda/device/prepare.cuh
  FIND [[{bank, table.version, table.resident};]]
  REPLACE [[{};]])

ultraep_add_device_mutant(device_bank_0_kept PROGRAM test_banks FILE cuda/device/replicate.cuh
  FIND [[    if (args.bank < 0) bank_of]]
  REPLACE [[    if (args.bank >= 0) bank_of]])

ultraep_add_device_mutant(device_bank_of_another PROGRAM test_banks FILE cuda/device/prepare.cuh
  FIND [[BankTables::row(known.offsets, c, launch.bank);]]
  REPLACE [[BankTables::row(known.offsets, c, 0);]])

ultraep_add_device_mutant(device_gradients_of_another_bank PROGRAM test_reduce
  FILE cuda/rank_state.hpp
  FIND [[layout.gradients(config, i).offset]]
  REPLACE [[layout.gradients(config, 0).offset]])

ultraep_add_device_mutant(device_words_of_another_bank HANGS PROGRAM test_ready
  FILE cuda/device/slot_words.cuh
  FIND [[+ int64_t{max32(bank, 0)} * known.capacity.slots_per_rank;]]
  REPLACE [[+ int64_t{min32(bank, 0)} * known.capacity.slots_per_rank;]])

ultraep_add_device_mutant(device_residents_told_late PROGRAM test_ready
  FILE cuda/device/slot_words.cuh
  FIND [[  ptx::sync_warp();  // the table changes now]]
  REPLACE [[]])

ultraep_add_device_mutant(device_slot_told_early PROGRAM test_ready FILE cuda/device/slot_words.cuh
  FIND [[      is_complete = memory.observe(done) == call.epoch.number;]]
  REPLACE [[      is_complete = true;]])

ultraep_add_device_mutant(device_slots_not_released PROGRAM test_ready FILE cuda/device/wait.cuh
  FIND [[  release_slots(state);]]
  REPLACE [[]])

ultraep_add_device_mutant(device_slot_not_released PROGRAM test_ready
  FILE cuda/device/slot_words.cuh
  FIND [[if (is_filled && is_complete) ptx::store_release_device(words + s, number);]]
  REPLACE [[if (is_filled && is_complete) words[s] = number;]])

# ---- the reroute ---------------------------------------------------------------------------------

ultraep_add_device_mutant(reroute_counts_not_acquired PROGRAM test_reroute
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[load_acquire_device(const uint64_t* at) {
  emulation::look();
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_acquire);]]
  REPLACE [[load_acquire_device(const uint64_t* at) {
  emulation::look();
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_relaxed);]])

ultraep_add_device_mutant(reroute_counts_not_released PROGRAM test_reroute
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[store_release_device(uint64_t* at, uint64_t value) {
  std::atomic_ref(*at).store(value, std::memory_order_release);]]
  REPLACE [[store_release_device(uint64_t* at, uint64_t value) {
  std::atomic_ref(*at).store(value, std::memory_order_relaxed);]])

ultraep_add_device_mutant(reroute_published_before_counted PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[  ptx::sync_block();
  // Release: pairs with await_counts() of every later block]]
  REPLACE [[  // Release: pairs with await_counts() of every later block]])

ultraep_add_device_mutant(reroute_sums_published_too_early PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[  ptx::sync_block();
  // Release: pairs with await_counts() of the next window's blocks.]]
  REPLACE [[]])

ultraep_add_device_mutant(reroute_one_thread_awaits_for_itself PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[    await_flag(&block.arrays.summed[window - 1], block.launch);
  ptx::sync_block();]]
  REPLACE [[    await_flag(&block.arrays.summed[window - 1], block.launch);]])

ultraep_add_device_mutant(reroute_run_before_left_out PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[rows[i] = left > 0 ?]]
  REPLACE [[rows[i] = left > 1 ?]])

ultraep_add_device_mutant(reroute_flags_of_any_launch PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[  ++state.launches;]]
  REPLACE [[]])

ultraep_add_device_mutant(reroute_fault_not_reset PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[  state.fault = 0;]]
  REPLACE [[]])

ultraep_add_device_mutant(reroute_left_not_reset HANGS PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[  state.left = 0;]]
  REPLACE [[]])

ultraep_add_device_mutant(reroute_leaves_relaxed PROGRAM test_reroute
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[fetch_add(value, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(value, std::memory_order_relaxed)]])

ultraep_add_device_mutant(reroute_lanes_count_at_once PROGRAM test_reroute
  FILE cuda/device/reroute.cuh
  FIND [[    ptx::sync_warp();  // all have read what the first of them now replaces]]
  REPLACE [[]])

ultraep_add_device_mutant(reroute_zeros_after_ones PROGRAM test_reroute
  FILE cuda/device/reroute_map.cuh
  FIND [[  if (!is_good) return;]]
  REPLACE [[  if (!is_good) return;
  clear_rows(args, first_of_block, width);]])

ultraep_add_device_mutant(reroute_last_fault_stays PROGRAM test_reroute
  FILE cuda/device/reroute_runs.cuh
  FIND [[  if (ptx::load_acquire_system(&said.routing) != 0) return;]]
  REPLACE [[]])

ultraep_add_device_mutant(reroute_leaves_rubbish_for_a_bad_plan PROGRAM test_reroute
  FILE cuda/device/reroute.cuh
  FIND [[return store_padding<Id>(args, block);]]
  REPLACE [[return;]])

ultraep_add_device_mutant(reroute_leaves_rubbish_for_a_bad_id PROGRAM test_reroute
  FILE cuda/device/reroute.cuh
  FIND [[own.expert[i] = position < args.count ? kPadding : kBeyond;]]
  REPLACE [=[own.expert[i] = id[i] == Id{kPadding} && position < args.count ? kPadding : kBeyond;]=])

ultraep_add_device_mutant(reroute_leaves_rubbish_in_a_map PROGRAM test_reroute
  FILE cuda/device/reroute_map.cuh
  FIND [[  if (!is_good) {
    clear_rows(args, first_of_block, width);]]
  REPLACE [[  if (!is_good) {]])

# ---- the reduction -------------------------------------------------------------------------------

ultraep_add_device_mutant(reduce_published_before_all_lanes_have_stored PROGRAM test_reduce
  FILE cuda/device/adder.cuh
  FIND [[    ptx::sync_warp();
    // Its release]]
  REPLACE [[    // Its release]])

ultraep_add_device_mutant(reduce_published_before_all_warps_have_stored HANGS PROGRAM test_reduce
  FILE cuda/device/adder.cuh
  FIND [[static_cast<uint32_t>(detail::Adders::warps())]]
  REPLACE [[1]])

ultraep_add_device_mutant(reduce_sum_not_released PROGRAM test_reduce
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[  std::atomic_ref(*at).store(value, std::memory_order_release);
  emulation::act();
}
inline void fence_system]]
  REPLACE [[  std::atomic_ref(*at).store(value, std::memory_order_relaxed);
  emulation::act();
}
inline void fence_system]])

ultraep_add_device_mutant(reduce_sum_not_acquired PROGRAM test_reduce
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[  emulation::observed();
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_acquire);]]
  REPLACE [[  emulation::observed();
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_relaxed);]])

ultraep_add_device_mutant(reduce_arrivals_relaxed PROGRAM test_reduce
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[fetch_add(value, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(value, std::memory_order_relaxed)]])

ultraep_add_device_mutant(reduce_loaded_before_summed PROGRAM test_reduce
  FILE core/transfer/reducer.hpp
  FIND [[    if (r.of_hub) {
      // Rule]]
  REPLACE [[    if (false) {
      // Rule]])

ultraep_add_device_mutant(reduce_cleared_before_read PROGRAM test_reduce
  FILE core/transfer/reducer.hpp
  FIND [[i = 0; i < r.count; ++i) {
      const Expected& reader]]
  REPLACE [[i = 0; false && i < r.count; ++i) {
      const Expected& reader]])

ultraep_add_device_mutant(reduce_readers_not_awaited PROGRAM test_reduce
  FILE core/transfer/announce.hpp
  FIND [[    if (state == FlagState::kArrived) return kAll;]]
  REPLACE [[    if (state == FlagState::kArrived || e.kind == Expected::kConsumed) return kAll;]])

ultraep_add_device_mutant(reduce_addition_replaced_under_lanes HANGS PROGRAM test_reduce
  FILE cuda/device/adder.cuh
  FIND [[    return taken_ < kAdditions ||]]
  REPLACE [[    return true ||]])

ultraep_add_device_mutant(reduce_any_address_is_aligned PROGRAM test_reduce
  FILE cuda/device/adder.cuh
  FIND [[addition.aligned ? addition.elements / row : 0]]
  REPLACE [[true ? addition.elements / row : 0]])

# ---- the load ------------------------------------------------------------------------------------

ultraep_add_device_mutant(load_arrivals_relaxed PROGRAM test_load
  FILE device/emulation/cuda/device/ptx.cuh
  FIND [[fetch_add(value, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(value, std::memory_order_relaxed)]])

ultraep_add_device_mutant(load_arrives_before_it_has_counted PROGRAM test_load
  FILE cuda/device/load.cuh
  FIND [[  ptx::sync_block();
  if (ptx::thread_idx() == 0)
    shared.last]]
  REPLACE [[  if (ptx::thread_idx() == 0)
    shared.last]])

ultraep_add_device_mutant(load_every_block_goes_on PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[== ptx::num_blocks_x() - 1;]]
  REPLACE [[>= 0;]])

ultraep_add_device_mutant(load_counted_before_zeroed PROGRAM test_load
  FILE cuda/device/load_count.cuh
  FIND [[counts[e] = 0;
  ptx::sync_block();]]
  REPLACE [[counts[e] = 0;]])

ultraep_add_device_mutant(load_added_before_counted PROGRAM test_load
  FILE cuda/device/load_count.cuh
  FIND [[  overlapped();
  ptx::sync_block();]]
  REPLACE [[  overlapped();]])

ultraep_add_device_mutant(load_counts_left_over PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[    counts[e] = 0;]]
  REPLACE [[]])

ultraep_add_device_mutant(load_row_sent_before_it_is_there PROGRAM test_load
  FILE cuda/device/load.cuh
  FIND [[  take_row(part, sums);
  ptx::sync_block();]]
  REPLACE [[  take_row(part, sums);]])

ultraep_add_device_mutant(load_table_copied_too_early PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[  ptx::sync_block();
  const bool done]]
  REPLACE [[  const bool done]])

ultraep_add_device_mutant(load_row_without_proxy_fence PROGRAM test_load
  FILE core/transfer/gather.hpp
  FIND [[    if (!mover_.loaded(0)) return Step::kAwaitDelivered;
    store]]
  REPLACE [[    store]])

ultraep_add_device_mutant(load_row_published_when_stored PROGRAM test_load
  FILE core/transfer/gather.hpp
  FIND [[    if (!mover_.wait_delivered(last_ticket_, true, [&](Delivered token) {]]
  REPLACE [[    if (!mover_.wait_delivered(0, true, [&](Delivered token) {]])

ultraep_add_device_mutant(load_not_drained PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[  while (gather.drain_step() != Step::kFinished) ptx::pause();]]
  REPLACE [[]])

ultraep_add_device_mutant(load_arrivals_not_reset HANGS PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[  state.left = 0;]]
  REPLACE [[]])

ultraep_add_device_mutant(load_epoch_not_advanced PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[    state.epoch = block.call.epoch.number;]]
  REPLACE [[]])

ultraep_add_device_mutant(load_digest_not_chained PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[    state.digest = shared.digest;]]
  REPLACE [[]])

ultraep_add_device_mutant(load_failure_of_a_team_unseen PROGRAM test_load
  FILE cuda/device/load.cuh
  FIND [[    ptx::store_shared_relaxed(&shared.failed, 1);]]
  REPLACE [[    shared.last = 1;]])

ultraep_add_device_mutant(load_table_without_its_end PROGRAM test_load
  FILE cuda/device/load.cuh
  FIND [[at = chunks_end + ptx::thread_idx(); at < count;]]
  REPLACE [[at = chunks_end + ptx::thread_idx(); at < count - 1;]])

ultraep_add_device_mutant(load_peers_unchecked PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[  if (early.fault != Fault::kNone)]]
  REPLACE [[  if (false)]])

ultraep_add_device_mutant(load_earlier_failure_unseen PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[    if (has_failed(block)) return false;  //]]
  REPLACE [[    if (false) return false;  //]])

ultraep_add_device_mutant(load_cancelled_before_unseen PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[!shared.failed && !shared.cancelled;]]
  REPLACE [[!shared.failed;]])

ultraep_add_device_mutant(load_bad_ids_left_out PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[    clean = ptx::load_global(&state.bad_id) == 0 && failed == 0;]]
  REPLACE [[    clean = failed == 0;]])

ultraep_add_device_mutant(load_bad_id_stays PROGRAM test_load FILE cuda/device/load.cuh
  FIND [[  state.bad_id = 0;]]
  REPLACE [[]])

ultraep_add_device_mutant(load_any_bad_id PROGRAM test_load FILE cuda/device/load_count.cuh
  FIND [[    ptx::max_relaxed(sums.bad_id, bad_id_word(static_cast<uint64_t>(position)));]]
  REPLACE [[    *sums.bad_id = bad_id_word(static_cast<uint64_t>(position));]])

ultraep_add_device_mutant(load_rejected_without_a_word HANGS PROGRAM test_load
  FILE cuda/device/wait.cuh
  FIND [[  announce_absence(block.call, memory, publisher, record.word);]]
  REPLACE [[  announce_absence(block.call, memory, publisher, 0);]])

ultraep_add_device_mutant(load_planned_before_copied PROGRAM test_load_plan
  FILE cuda/device/plan_sort.cuh
  FIND [[  copy_constants(args, block);
  ptx::sync_block();]]
  REPLACE [[  copy_constants(args, block);]])

ultraep_add_device_mutant(load_failed_and_no_plan PROGRAM test_load_plan
  FILE cuda/device/load_plan.cuh
  FIND [[return write_empty_plan(own, nullptr, true);]]
  REPLACE [[return;]])

# ---- the plan ------------------------------------------------------------------------------------

ultraep_add_device_mutant(device_answers_read_before_all_have_answered PROGRAM test_plan
  FILE cuda/device/block_teams.cuh
  FIND [[    if (Warp::leader()) now[index()] = value;
    ptx::sync_block();]]
  REPLACE [[    if (Warp::leader()) now[index()] = value;
    ptx::sync_warp();]])

ultraep_add_device_mutant(device_answers_overwritten PROGRAM test_plan
  FILE cuda/device/block_teams.cuh
  FIND [[    turn_ ^= 1;]]
  REPLACE [[]])

ultraep_add_device_mutant(device_added_before_zero PROGRAM test_plan
  FILE cuda/device/plan_sort.cuh
  FIND [[  copy_constants(args, block);
  ptx::sync_block();]]
  REPLACE [[  copy_constants(args, block);]])

ultraep_add_device_mutant(device_only_own_faults HANGS PROGRAM test_plan
  FILE cuda/device/block_teams.cuh
  FIND [[      value = min_u32(value, static_cast<uint32_t>(all[i]));]]
  REPLACE [[      (void)all;]])

ultraep_add_device_mutant(device_last_fault_of_a_load_stays PROGRAM test_plan
  FILE cuda/device/plan.cuh
  FIND [[ && ptx::load_acquire_system(word) == 0)]]
  REPLACE [[)]])

ultraep_add_device_mutant(device_pads_nobody PROGRAM test_plan FILE cuda/device/plan_sort.cuh
  FIND [[    s.rank_load[r] += i >= first ? 1 : 0;]]
  REPLACE [[]])

ultraep_add_device_mutant(device_plan_of_another_warp PROGRAM test_plan
  FILE core/plan/pool_search.hpp
  FIND [[best = v - first_;]]
  REPLACE [[best = 0;]])

ultraep_add_device_mutant(device_one_pool_of_all PROGRAM test_plan
  FILE cuda/device/plan_sort.cuh
  FIND [[    if (block.pool[r] != block.pool[0]) Warp::set(block.is_split);]]
  REPLACE [[    if (block.pool[r] != block.pool[r]) Warp::set(block.is_split);]])

ultraep_add_device_mutant(device_tokens_of_one_thread PROGRAM test_plan
  FILE cuda/device/plan_sort.cuh
  FIND [[    Warp::atomic_add(block.tokens_before + r, tokens);]]
  REPLACE [[    block.tokens_before[r] = tokens;]])

ultraep_add_device_mutant(device_steps_swapped PROGRAM test_plan FILE core/plan/pool_search.hpp
  FIND [[      n = succeeds ? 2 * n : 2 * n + 1;]]
  REPLACE [[      n = succeeds ? 2 * n + 1 : 2 * n;]])

# ---- plans of a bank ----------------------------------------------------------------------------

ultraep_add_device_mutant(device_plans_on_unknown_residents PROGRAM test_plan
  FILE cuda/device/plan_bank.cuh
  FIND [[table.segments != 0;]]
  REPLACE [[table.resident != nullptr;]])

ultraep_add_device_mutant(device_moves_of_nothing PROGRAM test_plan
  FILE cuda/device/plan_bank.cuh
  FIND [[    moves[i] = expert != bank.residents[i];]]
  REPLACE [[    moves[i] = expert >= 0;]])

ultraep_add_device_mutant(device_best_plan_forgotten PROGRAM test_plan
  FILE cuda/device/plan_bank.cuh
  FIND [[search.run(is_planned)]]
  REPLACE [[search.run(false)]])

ultraep_add_device_mutant(device_no_tokens_go_home PROGRAM test_plan
  FILE core/plan/resident_flow.hpp
  FIND [[        if (s.depth[home] < base) team.atomic_min(]]
  REPLACE [[        if (false) team.atomic_min(]])

ultraep_add_device_mutant(device_last_slot_leads_there PROGRAM test_plan
  FILE core/plan/resident_flow.hpp
  FIND [[if (s.depth[rank] < base) team.atomic_min(s.first + rank, static_cast<uint32_t>(i));]]
  REPLACE [[if (s.depth[rank] < base) s.first[rank] = static_cast<uint32_t>(i);]])

ultraep_add_device_mutant(device_any_rank_with_room PROGRAM test_plan
  FILE core/plan/resident_flow.hpp
  FIND [[if (room > 0) team.atomic_min(s.best + way.root, order_of(r, room));]]
  REPLACE [[if (room > 0) s.best[way.root] = order_of(r, room);]])

ultraep_add_device_mutant(device_imports_counted_by_one PROGRAM test_plan
  FILE core/plan/resident_search.hpp
  FIND [[      team_.atomic_add(s_.imports + rank, 1);]]
  REPLACE [[      ++s_.imports[rank];]])

ultraep_add_device_mutant(device_states_copied_in_part PROGRAM test_plan
  FILE core/plan/resident_flow.hpp
  FIND [[const auto count = static_cast<int32_t>(bytes / 8);]]
  REPLACE [[const auto count = static_cast<int32_t>(bytes / 16);]])

ultraep_add_device_mutant(device_last_variant_wins PROGRAM test_plan
  FILE core/plan/resident_search.hpp
  FIND [[for (int32_t v = kResidentVariants - 1; v >= 0; --v) {]]
  REPLACE [[for (int32_t v = 0; v < kResidentVariants; ++v) {]])

ultraep_add_device_mutant(device_words_compared_apart PROGRAM test_plan
  FILE core/base/team.hpp
  FIND [[leads &= word == team.min_sync(leads ? word : ~0u);]]
  REPLACE [[leads &= word == team.min_sync(word);]])

ultraep_add_mutants(device _ultraep_device_program)
