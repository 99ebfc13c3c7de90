# What members of a team do together, each broken in a program that then must not pass.

# ultraep_add_core_mutant(<name> PROGRAM <test> FILE <path below src/> FIND [[...]] REPLACE [[...]])
#
# PROGRAM is the path of a test below this folder, without .cc.
function(ultraep_add_core_mutant name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PROGRAM;FILE;FIND;REPLACE" "")
  ultraep_mutate(core NAME ${name} PROGRAM ${arg_PROGRAM} WATCHDOG 50 FILE "${arg_FILE}"
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

find_package(Threads REQUIRED)
function(_ultraep_core_program target program copies)
  add_executable(${target} EXCLUDE_FROM_ALL core/${program}.cc)
  ultraep_compile_mutants(${target} ${copies} mutants_std)
  target_link_libraries(${target} PRIVATE ultraep_core Threads::Threads)
endfunction()

# ---- a take -------------------------------------------------------------------------------------

ultraep_add_core_mutant(openings_of_each PROGRAM transfer/test_team
  FILE core/transfer/stripe.hpp
  FIND [[    return (both & 0xFFFF) != 0;]]
  REPLACE [[    return waits;]])

ultraep_add_core_mutant(chosen_by_each PROGRAM transfer/test_team FILE core/transfer/stripe.hpp
  FIND [[    const uint32_t chosen = team_.min_sync(best);]]
  REPLACE [[    const uint32_t chosen = best;]])

ultraep_add_core_mutant(taken_by_each PROGRAM transfer/test_team FILE core/transfer/stripe.hpp
  FIND [[    if (best == chosen) {]]
  REPLACE [[    if (true) {]])

ultraep_add_core_mutant(team_read_broadcast_by_leader PROGRAM transfer/test_team
  FILE core/transfer/stripe.hpp
  FIND [[    *at = team_.read_from(p % team_.size(), best_at);]]
  REPLACE [[    *at = team_.broadcast(best_at);]])

ultraep_add_core_mutant(wait_of_each PROGRAM transfer/test_team FILE core/transfer/stripe.hpp
  FIND [[    return team_.broadcast(wait);]]
  REPLACE [[    return wait;]])

ultraep_add_core_mutant(fault_of_each PROGRAM transfer/test_team FILE core/transfer/stripe.hpp
  FIND [[    *why = team_.min_sync(failed);]]
  REPLACE [[    *why = failed;]])

ultraep_add_core_mutant(first_member_blames PROGRAM transfer/test_team
  FILE core/transfer/stripe.hpp
  FIND [[failure(r, why));]]
  REPLACE [[failure(team_.index(), why));]])

# ---- a publish ----------------------------------------------------------------------------------

ultraep_add_core_mutant(one_destination_for_all PROGRAM transfer/test_team
  FILE core/transfer/storer.hpp
  FIND [[destination(piece, first + team_.index(), stage.span)]]
  REPLACE [[destination(piece, first, stage.span)]])

ultraep_add_core_mutant(ready_by_each PROGRAM transfer/test_team FILE core/transfer/storer.hpp
  FIND [[    if (piece.sets_ready && team_.leader()) {]]
  REPLACE [[    if (piece.sets_ready) {]])

ultraep_add_core_mutant(arrived_by_each PROGRAM transfer/test_team FILE core/transfer/storer.hpp
  FIND [[    if (team_.leader()) arrived = memory_.arrive(token, &call_.arrived[t], share);]]
  REPLACE [[    arrived = memory_.arrive(token, &call_.arrived[t], share);]])

ultraep_add_core_mutant(arrival_not_shared PROGRAM transfer/test_team FILE core/transfer/storer.hpp
  FIND [[    if (team_.broadcast(arrived) == task.num_groups)]]
  REPLACE [[    if (arrived == task.num_groups)]])

ultraep_add_core_mutant(done_by_each PROGRAM transfer/test_team FILE core/transfer/storer.hpp
  FIND [[    for (int32_t i = team_.index(); i < task.done_count; i += team_.size()) {]]
  REPLACE [[    for (int32_t i = 0; i < task.done_count; ++i) {]])

ultraep_add_core_mutant(pulled_by_each PROGRAM transfer/test_team FILE core/transfer/storer.hpp
  FIND [[    if (task.pulled_rank >= 0 && team_.leader())]]
  REPLACE [[    if (task.pulled_rank >= 0)]])

ultraep_add_core_mutant(open_by_each PROGRAM transfer/test_team FILE core/transfer/announce.hpp
  FIND [[  for (int32_t r = team.index(); r < call.num_ranks; r += team.size())
    if (call.work.opens[r])]]
  REPLACE [[  for (int32_t r = 0; r < call.num_ranks; ++r)
    if (call.work.opens[r])]])

# ---- a wait for peers ---------------------------------------------------------------------------

ultraep_add_core_mutant(finish_waits_for_each PROGRAM transfer/test_team
  FILE core/transfer/announce.hpp
  FIND [[    return team_.min_sync(next_ == first) == 0 ? Step::kProgress : Step::kWaitsForPeer;]]
  REPLACE [[    return next_ != first ? Step::kProgress : Step::kWaitsForPeer;]])

ultraep_add_core_mutant(finish_fails_for_each PROGRAM transfer/test_team
  FILE core/transfer/announce.hpp
  FIND [[    fault_ = team_.read_from(waits_for_ % team_.size(), fault);]]
  REPLACE [[    fault_ = fault;]])

ultraep_add_core_mutant(finish_progress_of_each PROGRAM transfer/test_team
  FILE core/transfer/announce.hpp
  FIND [[team_.min_sync(next_ == first) == 0 ?]]
  REPLACE [[next_ != first ?]])

ultraep_add_core_mutant(abort_of_each PROGRAM transfer/test_team FILE core/transfer/call.hpp
  FIND [[  first = team.min_sync(first);]]
  REPLACE [[]])

ultraep_add_core_mutant(disagreement_of_each PROGRAM transfer/test_team
  FILE core/transfer/failure.hpp
  FIND [[  first = team.min_sync(first);]]
  REPLACE [[]])

ultraep_add_core_mutant(early_fault_of_each PROGRAM transfer/test_team
  FILE core/transfer/failure.hpp
  FIND [[static_cast<int32_t>(team.min_sync(found));]]
  REPLACE [[static_cast<int32_t>(found);]])

ultraep_add_core_mutant(called_for_each PROGRAM transfer/test_team FILE core/transfer/failure.hpp
  FIND [[  return team.min_sync(all) != 0;]]
  REPLACE [[  return all != 0;]])

# ---- the exchange of loads ----------------------------------------------------------------------

ultraep_add_core_mutant(row_to_whoever_waits PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[    store(mine == kReady ? at : -1);]]
  REPLACE [[    store(mine != kAll ? at : -1);]])

ultraep_add_core_mutant(row_published_by_each PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[          for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {]]
  REPLACE [[          for (int32_t r = 0; r < call_.num_ranks; ++r) {]])

ultraep_add_core_mutant(row_published_twice PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[            if (sent_[r] != kStored) continue;]]
  REPLACE [[            if (sent_[r] == kUnsent) continue;]])

ultraep_add_core_mutant(row_published_when_stored PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[    if (!mover_.wait_delivered(last_ticket_, true, [&](Delivered token) {]]
  REPLACE [[    if (!mover_.wait_delivered(0, true, [&](Delivered token) {]])

ultraep_add_core_mutant(rows_held_while_blocked PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[    if (num_unpublished_ > 0) return publish_step();]]
  REPLACE [[    if (num_unpublished_ > 0 && sent != Step::kWaitsForPeer) return publish_step();]])

ultraep_add_core_mutant(exchange_goes_by_each PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[        team_.min_sync(static_cast<uint32_t>(mine) << 30 | static_cast<uint32_t>(at));]]
  REPLACE [[        (static_cast<uint32_t>(mine) << 30 | static_cast<uint32_t>(at));]])

ultraep_add_core_mutant(exchange_fails_for_each PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[fault_ = team_.read_from(waits_for_ % team_.size(), fault);]]
  REPLACE [[fault_ = fault;]])

ultraep_add_core_mutant(exchange_progress_of_each PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[    return team_.min_sync(next_ == first) == 0 ? Step::kProgress : Step::kWaitsForPeer;]]
  REPLACE [[    return next_ != first ? Step::kProgress : Step::kWaitsForPeer;]])

ultraep_add_core_mutant(exchange_waits_for_the_last PROGRAM transfer/test_gather
  FILE core/transfer/gather.hpp
  FIND [[ && mine == kWaits) continue;  // the first is named]]
  REPLACE [[ && mine == kReady) continue;]])

# ---- a probe -------------------------------------------------------------------------------------

ultraep_add_core_mutant(moved_before_read PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[      if (i < count) moved = entry[i + 1];
      team.sync();]]
  REPLACE [[      if (i < count) moved = entry[i + 1];]])

ultraep_add_core_mutant(place_of_each PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[      const auto stays = static_cast<int32_t>(team.min_sync(moves ? team.size() : team.index()));]]
  REPLACE [[      const int32_t stays = moves ? team.size() : team.index();]])

ultraep_add_core_mutant(entered_by_each PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[    if (team.leader()) entry[at] = added;]]
  REPLACE [[    entry[at] = added;]])

ultraep_add_core_mutant(found_before_entered PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[    if (team.leader()) entry[at] = added;
    team.sync();]]
  REPLACE [[    if (team.leader()) entry[at] = added;]])

ultraep_add_core_mutant(fit_of_each PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[      const auto found = static_cast<int32_t>(team.min_sync(fits ? n : room));]]
  REPLACE [[      const int32_t found = fits ? n : room;]])

ultraep_add_core_mutant(main_of_each PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[    best = static_cast<int32_t>(team.min_sync(left == best_left ? own : num_open));]]
  REPLACE [[    best = own;]])

ultraep_add_core_mutant(taken_by_each PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[    if (best % team.size() == team.index()) tokens_left[best] -= quota;]]
  REPLACE [[    tokens_left[best] -= quota;]])

ultraep_add_core_mutant(level_highest_of_each PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[  return static_cast<int32_t>(team.min_sync(most == all ? first : count));]]
  REPLACE [[  return most == all ? first : 0;]])

ultraep_add_core_mutant(level_taken_before_read PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[      team.sync();  // all have read]]
  REPLACE [[]])

ultraep_add_core_mutant(level_filled_before_taken PROGRAM plan/test_probe FILE core/plan/probe.hpp
  FIND [[      slack(to) = 0;
    }
    team.sync();]]
  REPLACE [[      slack(to) = 0;
    }]])

# ---- a packed probe ------------------------------------------------------------------------------

ultraep_add_core_mutant(packed_without_turns PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[static_cast<uint32_t>((turn + 1) << slot)]]
  REPLACE [[static_cast<uint32_t>(1 << slot)]])

ultraep_add_core_mutant(packed_level PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[ && question.variant / kNumOrders != kLevel &&]]
  REPLACE [[ &&]])

ultraep_add_core_mutant(packed_latest_last PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[          --turn;
          if]]
  REPLACE [[          ++turn;
          if]])

ultraep_add_core_mutant(packed_taker_of_each PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[          found = team.min_unordered(found);]]
  REPLACE [[]])

ultraep_add_core_mutant(packed_widest_of_each PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[    return team.min_unordered(first);]]
  REPLACE [[    return first;]])

ultraep_add_core_mutant(packed_costs_nothing PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[          waste_left -= max32(min32(beyond, largest) - quota, 0);]]
  REPLACE [[]])

ultraep_add_core_mutant(packed_joins_nowhere PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[      if (joins != index + p * size) continue;]]
  REPLACE [[      if (joins >= 0) continue;]])

ultraep_add_core_mutant(packed_full_ranks_stay PROGRAM plan/test_probe
  FILE core/plan/packed_probe.hpp
  FIND [[          if (rest > 0 && slot < question.max_imports - 1) key]]
  REPLACE [[          if (rest > 0) key]])

ultraep_add_core_mutant(packed_next_exporter_again PROGRAM plan/test_probe
  FILE core/plan/packed_probe.hpp
  FIND [[    next = team.read_from((h + 1) % size, mine);]]
  REPLACE [[    next = team.read_from(h % size, mine);]])

ultraep_add_core_mutant(packed_first_main_again PROGRAM plan/test_probe
  FILE core/plan/packed_probe.hpp
  FIND [[      if (index == best) own = lack(from.extra + need, best);]]
  REPLACE [[]])

ultraep_add_core_mutant(packed_too_large PROGRAM plan/test_probe FILE core/plan/packed_probe.hpp
  FIND [[ >> (31 - low) == 0;]]
  REPLACE [[ >> 31 == 0;]])

# ---- two sides ----------------------------------------------------------------------------------

ultraep_add_core_mutant(fetch_fault_unseen PROGRAM transfer/test_stream
  FILE core/transfer/worker.hpp
  FIND [[return fetcher_.fault() != Fault::kNone ? Step::kFailed : storer_.step();]]
  REPLACE [[return storer_.step();]])

ultraep_add_core_mutant(store_fault_unseen PROGRAM transfer/test_stream
  FILE core/transfer/worker.hpp
  FIND [[return storer_.fault() != Fault::kNone ? Step::kFailed : fetcher_.step();]]
  REPLACE [[return fetcher_.step();]])

# ---- shares -------------------------------------------------------------------------------------

ultraep_add_core_mutant(part_one_too_small PROGRAM reroute/test_shares FILE core/reroute/shares.hpp
  FIND [[(left >= turn.remaining ? 1 : 0)]]
  REPLACE [[0]])

ultraep_add_core_mutant(shares_before_all_turns PROGRAM reroute/test_shares
  FILE core/reroute/shares.hpp
  FIND [[      left -= turns[r].rest;
    }
    team.sync();]]
  REPLACE [[      left -= turns[r].rest;
    }]])

ultraep_add_core_mutant(instances_not_listed_yet PROGRAM reroute/test_shares
  FILE core/reroute/share_table.hpp
  FIND [[  team.sync();

  // What the shares depend on.]]
  REPLACE [[]])

# ---- a plan's check, its schedule, its worklist and its digest -----------------------------------

# ultraep_add_prepare_mutant(<name> <header below core/, without .hpp> FIND [[...]] REPLACE [[...]])
function(ultraep_add_prepare_mutant name header)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "FIND;REPLACE" "")
  ultraep_add_core_mutant(${name} PROGRAM transfer/test_prepare_teams FILE core/${header}.hpp
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

ultraep_add_prepare_mutant(plan_fault_of_each plan/check
  FIND [[  first = team.min_sync(first);]]
  REPLACE [[]])

ultraep_add_prepare_mutant(counts_not_zero_yet schedule/schedule
  FIND [[  auto placed = static_cast<int32_t>(team.exclusive_sum(own));]]
  REPLACE [[  int32_t placed = 0;
  for (int32_t at = 0; at < ranks.begin * slots; ++at) placed += slot_expert[at] >= 0;]])

ultraep_add_prepare_mutant(empty_slots_listed schedule/schedule
  FIND [[      if (alone || is_expert(e)) {]]
  REPLACE [[      {]])

ultraep_add_prepare_mutant(absent_experts_listed schedule/schedule
  FIND [[    if (alone || n > 0) {]]
  REPLACE [[    {]])

ultraep_add_prepare_mutant(imports_of_each schedule/schedule
  FIND [[  shape.max_imports = static_cast<int32_t>(highest(team, static_cast<uint32_t>(max_imports)));]]
  REPLACE [[  shape.max_imports = max_imports;
  team.sync();]])

ultraep_add_prepare_mutant(replicas_in_one_place schedule/schedule
  FIND [[    const int32_t to = count[e] + nth;]]
  REPLACE [[    const int32_t to = count[e];]])

ultraep_add_prepare_mutant(counted_before_placed schedule/schedule
  FIND [[    const int32_t to = count[e] + nth;
    team.sync();]]
  REPLACE [[    const int32_t to = count[e] + nth;]])

ultraep_add_prepare_mutant(chained_for_each schedule/schedule
  FIND [[  shape.chained = team.count(chained).all > 0;]]
  REPLACE [[  shape.chained = chained;
  team.sync();]])

ultraep_add_prepare_mutant(places_not_zero_yet schedule/hubs
  FIND [[place[i] = 0;
  team.sync();]]
  REPLACE [[place[i] = 0;]])

ultraep_add_prepare_mutant(places_not_counted_yet schedule/hubs
  FIND [[    team.atomic_add(&place[most - s.num_replicas(x)], 1);
  team.sync();]]
  REPLACE [[    team.atomic_add(&place[most - s.num_replicas(x)], 1);]])

ultraep_add_prepare_mutant(places_not_known_yet schedule/hubs
  FIND [[    at += n;
  }
  team.sync();]]
  REPLACE [[    at += n;
  }]])

ultraep_add_prepare_mutant(place_taken_before_read schedule/hubs
  FIND [[    const int32_t to = place[i] + nth;
    team.sync();]]
  REPLACE [[    const int32_t to = place[i] + nth;]])

ultraep_add_prepare_mutant(order_not_complete schedule/hubs
  FIND [[  team.sync();
  return num_shared;]]
  REPLACE [[  return num_shared;]])

ultraep_add_prepare_mutant(filled_by_each schedule/hubs
  FIND [[    num_below = team.sum(num_below);
    filled =]]
  REPLACE [[    team.sync();
    filled =]])

ultraep_add_prepare_mutant(units_to_each schedule/hubs
  FIND [[counted.before < left;]]
  REPLACE [[0 < left;]])

ultraep_add_prepare_mutant(filled_before_stored schedule/hubs
  FIND [[  team.sync();  // the next expert may have the same hubs]]
  REPLACE [[]])

ultraep_add_prepare_mutant(egress_not_zero_yet schedule/hubs
  FIND [[s.egress[r] = 0;
  team.sync();]]
  REPLACE [[s.egress[r] = 0;]])

ultraep_add_prepare_mutant(homes_not_assigned_yet schedule/hubs
  FIND [[n * kEgressUnit);
  }
  team.sync();]]
  REPLACE [[n * kEgressUnit);
  }]])

ultraep_add_prepare_mutant(boundaries_not_complete schedule/hubs
  FIND [[  team.sync();  // all boundaries are there]]
  REPLACE [[]])

ultraep_add_prepare_mutant(level_of_each schedule/hubs
  FIND [[    level = 1 + static_cast<int32_t>(highest(team, static_cast<uint32_t>(level)));]]
  REPLACE [[    ++level;
    team.sync();]])

ultraep_add_prepare_mutant(levels_not_known_yet schedule/hubs
  FIND [[    team.sync();  // the next expert may have the same ranks]]
  REPLACE [[]])

ultraep_add_prepare_mutant(one_level_for_all schedule/hubs
  FIND [[    if (scratch.count[x] == level && ]]
  REPLACE [[    if (level == 1 && s.num_replicas(x) > 1 && ]])

ultraep_add_prepare_mutant(level_not_complete schedule/hubs
  FIND [[  team.sync();  // the next level may have the same hubs]]
  REPLACE [[]])

ultraep_add_prepare_mutant(wide_not_known_yet schedule/hubs
  FIND [[  if (team.count(meets).all > 0) return true;  // after]]
  REPLACE [[  // after]])

ultraep_add_prepare_mutant(meeting_of_each schedule/hubs
  FIND [[  return team.count(meets).all > 0;]]
  REPLACE [[  team.sync();
  return meets;]])

ultraep_add_prepare_mutant(second_pass_left_out schedule/hubs
  FIND [[  if (num_levels == 1) passes = 1;]]
  REPLACE [[  if (num_levels >= 1) passes = 1;]])

ultraep_add_prepare_mutant(busiest_of_each schedule/cost
  FIND [[static_cast<int64_t>(highest(team, most));]]
  REPLACE [[static_cast<int64_t>(most);]])

ultraep_add_prepare_mutant(forwarded_by_each schedule/cost
  FIND [[static_cast<int64_t>(team.sum(forwarded))]]
  REPLACE [[static_cast<int64_t>(forwarded)]])

ultraep_add_prepare_mutant(shape_by_each schedule/cost
  FIND [[  if (team.leader()) *shape = own;]]
  REPLACE [[  *shape = own;]])

ultraep_add_prepare_mutant(flags_not_zero_yet schedule/worklist
  FIND [[w.needs[r] = 0;
  team.sync();]]
  REPLACE [[w.needs[r] = 0;]])

ultraep_add_prepare_mutant(expected_in_one_place schedule/worklist
  FIND [[num_expected + counted.before]]
  REPLACE [[num_expected]])

ultraep_add_prepare_mutant(pieces_in_one_place schedule/worklist
  FIND [=[w.pieces[num_pieces + counted.before]]=]
  REPLACE [=[w.pieces[num_pieces]]=])

ultraep_add_prepare_mutant(tasks_by_each schedule/worklist
  FIND [[    if (team.leader()) w.tasks[num_tasks] = task;]]
  REPLACE [[    w.tasks[num_tasks] = task;]])

ultraep_add_prepare_mutant(worklist_not_complete schedule/worklist
  FIND [[    w.num_reductions = 0;
  }
  team.sync();]]
  REPLACE [[    w.num_reductions = 0;
  }]])

ultraep_add_prepare_mutant(digest_of_each base/digest
  FIND [[  return mix(state, team.sum(sum));]]
  REPLACE [[  return mix(state, sum);]])

# ---- a reduction's schedule and worklist ---------------------------------------------------------

ultraep_add_core_mutant(reductions_by_each PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_worklist.hpp
  FIND [=[    if (team.leader()) w.reductions[num_reductions] = reduction;]=]
  REPLACE [=[    w.reductions[num_reductions] = reduction;]=])

ultraep_add_core_mutant(sources_in_one_place PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_worklist.hpp
  FIND [[      put_source(num_sources + i - first, i);]]
  REPLACE [[      put_source(num_sources, i);]])

ultraep_add_core_mutant(sums_in_one_place PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_worklist.hpp
  FIND [=[w.reductions[num_reductions + counted.before]]=]
  REPLACE [=[w.reductions[num_reductions]]=])

ultraep_add_core_mutant(readers_in_one_place PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_worklist.hpp
  FIND [[put_expected(num_expected + counted.before,]]
  REPLACE [[put_expected(num_expected,]])

ultraep_add_core_mutant(reductions_not_complete PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_worklist.hpp
  FIND [[    w.num_expected = build.num_expected;
  }
  team.sync();]]
  REPLACE [[    w.num_expected = build.num_expected;
  }]])

ultraep_add_core_mutant(loads_not_zero_yet PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_schedule.hpp
  FIND [=[s.egress[r] = 0;
  team.sync();]=]
  REPLACE [=[s.egress[r] = 0;]=])

ultraep_add_core_mutant(sums_not_assigned_yet PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_schedule.hpp
  FIND [=[(shared ? 1 : n) * kEgressUnit);
  }
  team.sync();]=]
  REPLACE [=[(shared ? 1 : n) * kEgressUnit);
  }]=])

ultraep_add_core_mutant(busiest_reader_of_each PROGRAM transfer/test_reduce_teams
  FILE core/schedule/reduce_schedule.hpp
  FIND [[static_cast<int64_t>(highest(team, most));]]
  REPLACE [[static_cast<int64_t>(most);]])

# ---- a reducer -----------------------------------------------------------------------------------

ultraep_add_core_mutant(summed_by_each PROGRAM transfer/test_reducer FILE core/transfer/reducer.hpp
  FIND [[    if (r.kind == Reduction::kSum && team_.leader())]]
  REPLACE [[    if (r.kind == Reduction::kSum)]])

ultraep_add_core_mutant(sums_left_not_shared PROGRAM transfer/test_reducer
  FILE core/transfer/reducer.hpp
  FIND [[    if (team_.broadcast(arrived) ==]]
  REPLACE [[    if (arrived ==]])

ultraep_add_core_mutant(consumed_by_each PROGRAM transfer/test_reducer
  FILE core/transfer/reducer.hpp
  FIND [[    for (int32_t i = team_.index(); i < r.count; i += team_.size()) {]]
  REPLACE [[    for (int32_t i = 0; i < r.count; ++i) {]])

ultraep_add_core_mutant(gradients_of_32_bits PROGRAM transfer/test_reduce_large
  FILE core/transfer/reducer.hpp
  FIND [=[           at.slot * g.bytes[span.segment] + span.offset;]=]
  REPLACE [=[           static_cast<uint32_t>(at.slot * g.bytes[span.segment] + span.offset);]=])

# ---- memory -------------------------------------------------------------------------------------

ultraep_add_core_mutant(instances_without_mains PROGRAM transfer/test_layout
  FILE core/transfer/layout.hpp
  FIND [[    slot_offset[i] = round_up(at + num_local_experts * segment_bytes[i], align);]]
  REPLACE [[    slot_offset[i] = round_up(at, align);]])

ultraep_add_core_mutant(instances_share_pages PROGRAM transfer/test_layout
  FILE core/transfer/layout.hpp
  FIND [[    at = round_up(slot_offset[i] + slots * segment_bytes[i], align);]]
  REPLACE [[    at = slot_offset[i] + slots * segment_bytes[i];]])

# ---- sources ------------------------------------------------------------------------------------

ultraep_add_core_mutant(exports_not_counted_yet PROGRAM transfer/test_prepare_teams
  FILE core/schedule/schedule.hpp
  FIND [[  team.sync();                                                      // exports are counted]]
  REPLACE [[]])

ultraep_add_core_mutant(source_not_counted_yet PROGRAM transfer/test_prepare_teams
  FILE core/schedule/schedule.hpp
  FIND [[    team.sync();  // the next one counts it]]
  REPLACE [[]])

# ---- domains ------------------------------------------------------------------------------------

ultraep_add_core_mutant(crosses_for_each_replica PROGRAM schedule/test_schedule
  FILE core/schedule/hubs.hpp
  FIND [[  return domain != nullptr && is_foreign(domain, s, x);]]
  REPLACE [[  return 0;]])

ultraep_add_core_mutant(direct_across_domains PROGRAM schedule/test_schedule
  FILE core/schedule/cost.hpp
  FIND [[  if (mode < 0 && own.relays) mode = static_cast<int32_t>(relay);]]
  REPLACE [[]])

ultraep_add_core_mutant(holder_in_the_domain_left_out PROGRAM schedule/test_schedule
  FILE core/schedule/schedule.hpp
  FIND [[      is_native = is_near[x] != 0 || t.domain[home] == domain;]]
  REPLACE [[      is_native = t.domain[home] == domain;]])

ultraep_add_core_mutant(home_in_the_domain_left PROGRAM schedule/test_schedule
  FILE core/schedule/schedule.hpp
  FIND [[    const auto is_far = [&](int32_t rank) {
      return kSplit && is_native && t.domain[rank] != domain;]]
  REPLACE [[    const auto is_far = [&](int32_t rank) {
      return false && rank == home;]])

ultraep_add_core_mutant(domains_by_rank PROGRAM schedule/test_schedule
  FILE core/schedule/schedule.hpp
  FIND [=[t.domain[s.replica_rank[to - 1]] > t.domain[rank]; --to) {]=]
  REPLACE [[s.replica_rank[to - 1] > rank; --to) {]])

ultraep_add_prepare_mutant(entries_in_one_place schedule/schedule
  FIND [[      s.first[num_entries + counted.before] = i;]]
  REPLACE [[      s.first[num_entries] = i;]])

ultraep_add_prepare_mutant(entries_not_known_yet schedule/schedule
  FIND [[    s.first[num_entries] = num_replicas;
  }
  team.sync();]]
  REPLACE [[    s.first[num_entries] = num_replicas;
  }]])

ultraep_add_prepare_mutant(replicas_not_sorted_yet schedule/schedule
  FIND [[scratch.exports[r] = 0;
  team.sync();]]
  REPLACE [[scratch.exports[r] = 0;]])

ultraep_add_prepare_mutant(relays_of_each schedule/schedule
  FIND [[  shape.relays = team.count(relays).all > 0;]]
  REPLACE [[  shape.relays = relays;
  team.sync();]])

ultraep_add_mutants(core _ultraep_core_program)
