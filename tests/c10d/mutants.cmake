# Rules of the c10d engine's rounds and steps, each broken in a program that then must not pass.

# ultraep_add_c10d_mutant(<name> PROGRAM <test> FILE <path below src/> FIND [[...]] REPLACE [[...]])
#
# PROGRAM is the name of a test in this folder.
function(ultraep_add_c10d_mutant name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PROGRAM;FILE;FIND;REPLACE" "")
  ultraep_mutate(c10d NAME ${name} PROGRAM ${arg_PROGRAM} FILE "${arg_FILE}"
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

function(_ultraep_c10d_program target program copies)
  ultraep_add_mutated_library(mutants_c10d ${copies} ultraep_c10d c10d)
  target_link_libraries(mutants_c10d PUBLIC ultraep_engine)
  add_executable(${target} EXCLUDE_FROM_ALL c10d/${program}.cc)
  ultraep_compile_mutants(${target} ${copies} mutants_std)
  target_link_libraries(${target} PRIVATE mutants_c10d)
endfunction()

# ---- what a round may hold -----------------------------------------------------------------------

ultraep_add_c10d_mutant(rounds_gate_is_open PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[    return hop.behind < 0 || rounds_.gates[hop.behind].missing == 0;]]
  REPLACE [[    return true;]])

ultraep_add_c10d_mutant(rounds_gate_noted_early PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[.opened = t;]]
  REPLACE [[.opened = t - 1;]])

ultraep_add_c10d_mutant(rounds_two_to_one_receiver PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[ || receives_[pair->to] != nullptr) continue;]]
  REPLACE [[) continue;]])

ultraep_add_c10d_mutant(rounds_receiver_taken_away PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[      if (receives_[pair.to] != nullptr && !augment(receives_[pair.to]->from)) continue;]]
  REPLACE [[;]])

# ---- which chunks there are ----------------------------------------------------------------------

ultraep_add_c10d_mutant(rounds_chunks_overlap PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[(begin + length * (i + 1) / count)]]
  REPLACE [[(begin + (length * (i + 1) + count - 1) / count)]])

ultraep_add_c10d_mutant(rounds_hub_left_out PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[              if (i != hub - 1)
                rounds.hops.push_back({from,]]
  REPLACE [[              if (i != hub)
                rounds.hops.push_back({from,]])

ultraep_add_c10d_mutant(rounds_gradient_of_another PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[{rank[i], at, x, i, begin]]
  REPLACE [[{rank[i], at, x, 0, begin]])

# ---- which chunks go first -----------------------------------------------------------------------

ultraep_add_c10d_mutant(rounds_relayed_last PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[gain(first) > gain(second)]]
  REPLACE [[gain(first) < gain(second)]])

ultraep_add_c10d_mutant(rounds_last_chunks_first PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[return first.progress < second.progress;]]
  REPLACE [[return first.progress > second.progress;]])

ultraep_add_c10d_mutant(rounds_idle_ranks_first PROGRAM test_rounds FILE c10d/rounds.hpp
  FIND [[a->max_left > b->max_left;]]
  REPLACE [[a->max_left < b->max_left;]])

# ---- messages ------------------------------------------------------------------------------------

ultraep_add_c10d_mutant(ledger_one_tag_for_all PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[tile < end; ++tag) {]]
  REPLACE [[tile < end;) {]])

ultraep_add_c10d_mutant(ledger_tags_of_this_rank PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[    each_part(hop, [&](const TileSpan& span, int64_t its_tag) {
      if (!sends && !receives) return;]]
  REPLACE [[    if (!sends && !receives) continue;
    each_part(hop, [&](const TileSpan& span, int64_t its_tag) {]])

# ---- places --------------------------------------------------------------------------------------

ultraep_add_c10d_mutant(ledger_received_for_another PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[          step.place = slot_of(hop.replica);
        } else]]
  REPLACE [[          step.place = slot_of(0);
        } else]])

ultraep_add_c10d_mutant(ledger_source_is_the_main PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[s.source[entry].slot == kMainSlot;]]
  REPLACE [[true;]])

ultraep_add_c10d_mutant(ledger_sent_on_at_once PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[sends && hop.behind >= 0 ? rounds.gates[hop.behind].opened : -1,]]
  REPLACE [[sends && hop.behind >= 0 ? rounds.gates[hop.behind].opened - 1 : -1,]])

# ---- sums ----------------------------------------------------------------------------------------

ultraep_add_c10d_mutant(ledger_keeps_of_another PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [=[s.replica_slot[s.first[hop.entry] + own],]=]
  REPLACE [=[s.replica_slot[s.first[hop.entry]],]=])

ultraep_add_c10d_mutant(ledger_keeps_nothing PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[        if (sends) prepared->steps.push_back(kept(hop, span));]]
  REPLACE [[;]])

ultraep_add_c10d_mutant(ledger_own_part_comes_first PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[                -1,
                own};]]
  REPLACE [[                -1,
                -1};]])

ultraep_add_c10d_mutant(ledger_hub_adds_to_a_main PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[receives && s.source[entry].rank == rank;]]
  REPLACE [[receives;]])

# ---- calls that differ ---------------------------------------------------------------------------

ultraep_add_c10d_mutant(ledger_digests_not_chained PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[  digest_ = mix(digest_, digest);]]
  REPLACE [[  digest_ = digest;]])

ultraep_add_c10d_mutant(ledger_residents_not_noted PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[  banks_.note(args, epoch_ + 1);]]
  REPLACE [[]])

ultraep_add_c10d_mutant(ledger_bank_not_entered PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[  banks_.enter(args);]]
  REPLACE [[  args.bank.resident = banks_.residents(args.bank.index < 0 ? 0 : args.bank.index).data();]])

ultraep_add_c10d_mutant(ledger_moves_of_earlier_calls PROGRAM test_ledger FILE c10d/ledger.cc
  FIND [[  std::fill(slots_to_fill_.begin(), slots_to_fill_.end(), 0);]]
  REPLACE [[]])

ultraep_add_mutants(c10d _ultraep_c10d_program)
