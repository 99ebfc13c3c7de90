# Orderings and wake-ups of the host engine, each broken in a program of its own that must not pass.
#
# Not here, because ThreadSanitizer sees no difference: the store fence behind non-temporal stores
# (sanitized copying and clearing have none), the fence of flags_delivered(), the order of a
# doorbell's two words. The first two are for the simulated memory; the third is test_doorbell's, on
# real processors.

# ultraep_add_host_mutant(<name> [HANGS] PROGRAM <test> FILE <path below src/>
#                         FIND [[...]] REPLACE [[...]])
#
# PROGRAM is the name of a test in this folder. HANGS: what the mutant does is to hang, so the test's
# watchdog has less patience.
function(ultraep_add_host_mutant name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HANGS" "PROGRAM;FILE;FIND;REPLACE" "")
  set(watchdog "")
  if(arg_HANGS)
    set(watchdog WATCHDOG 3)
  endif()
  ultraep_mutate(host NAME ${name} PROGRAM ${arg_PROGRAM} ${watchdog} FILE "${arg_FILE}"
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

function(_ultraep_host_program target program copies)
  ultraep_add_mutated_library(mutants_host ${copies} ultraep_engine engine ultraep_host host)
  target_link_libraries(mutants_host PUBLIC ultraep_core Threads::Threads)
  add_executable(${target} EXCLUDE_FROM_ALL host/${program}.cc)
  ultraep_compile_mutants(${target} ${copies} mutants_std)
  target_link_libraries(${target} PRIVATE mutants_host)
endfunction()

# ---- flags and counters --------------------------------------------------------------------------

ultraep_add_host_mutant(publish_relaxed PROGRAM test_races FILE host/policies.hpp
  FIND [[store(value, std::memory_order_release)]]
  REPLACE [[store(value, std::memory_order_relaxed)]])

ultraep_add_host_mutant(observe_relaxed PROGRAM test_races FILE host/policies.hpp
  FIND [[word(bases_[rank_] + offset).load(std::memory_order_acquire)]]
  REPLACE [[word(bases_[rank_] + offset).load(std::memory_order_relaxed)]])

# The last worker of a task vouches for the others: each half of its ordering is needed.
ultraep_add_host_mutant(arrive_relaxed PROGRAM test_races FILE host/policies.hpp
  FIND [[fetch_add(n, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(n, std::memory_order_relaxed)]])

ultraep_add_host_mutant(arrive_without_acquire PROGRAM test_races FILE host/policies.hpp
  FIND [[fetch_add(n, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(n, std::memory_order_release)]])

ultraep_add_host_mutant(arrive_without_release PROGRAM test_races FILE host/policies.hpp
  FIND [[fetch_add(n, std::memory_order_acq_rel)]]
  REPLACE [[fetch_add(n, std::memory_order_acquire)]])

# ---- threads of one rank -------------------------------------------------------------------------

ultraep_add_host_mutant(shift_relaxed PROGRAM test_races FILE host/execute.cc
  FIND [[generation_.fetch_add(1);]]
  REPLACE [[generation_.fetch_add(1, std::memory_order_relaxed);]])

ultraep_add_host_mutant(helper_ends_relaxed PROGRAM test_races FILE host/execute.cc
  FIND [[helpers_busy_.fetch_sub(1)]]
  REPLACE [[helpers_busy_.fetch_sub(1, std::memory_order_relaxed)]])

ultraep_add_host_mutant(completed_relaxed PROGRAM test_races FILE host/execute.cc
  FIND [[completed_.store(epoch);]]
  REPLACE [[completed_.store(epoch, std::memory_order_relaxed);]])

ultraep_add_host_mutant(failed_relaxed PROGRAM test_races FILE host/execute.cc
  FIND [[failed_.store(report_.epoch);]]
  REPLACE [[failed_.store(report_.epoch, std::memory_order_relaxed);]])

ultraep_add_host_mutant(helpers_not_awaited PROGRAM test_races FILE host/execute.cc
  FIND [[(busy = helpers_busy_.load()) != 0;]]
  REPLACE [[(busy = helpers_busy_.load()) < 0u;]])

# A call that has failed is over only when its workers are.
ultraep_add_host_mutant(helpers_not_awaited_after_failure PROGRAM test_engine_settles
  FILE host/execute.cc
  FIND [[(busy = helpers_busy_.load()) != 0;]]
  REPLACE [[moved && (busy = helpers_busy_.load()) != 0;]])

ultraep_add_host_mutant(failed_before_workers_end PROGRAM test_engine_settles FILE host/execute.cc
  FIND [[  report_ = report;
]]
  REPLACE [[  report_ = report;
  failed_.store(report_.epoch);
]])

# ---- check mode ----------------------------------------------------------------------------------

ultraep_add_host_mutant(readers_not_awaited PROGRAM test_slot_check FILE host/execute.cc
  FIND [[    return drive(readers, prepared, interrupted);]]
  REPLACE [[    return true;]])

ultraep_add_host_mutant(checked_before_comparing PROGRAM test_slot_check FILE host/execute.cc
  FIND [[  slot_check_->publish_verdict(checked, damage.kind != Damage::kNone);]]
  REPLACE [[  slot_check_->publish_checked(checked);]])

# ---- reductions ----------------------------------------------------------------------------------

ultraep_add_host_mutant(sums_in_another_order PROGRAM test_add FILE host/add.cc
  FIND [=[value += element(from[s], i, kType);]=]
  REPLACE [=[value += element(from[kSources - s], i, kType);]=])

ultraep_add_host_mutant(sums_of_the_last_pass PROGRAM test_add FILE host/adder.hpp
  FIND [[        sum_gradients(sums_, first > 0, some,]]
  REPLACE [[        sum_gradients(sums_, first > 8, some,]])

ultraep_add_host_mutant(reducers_share_scratch PROGRAM test_reduction_races FILE host/execute.cc
  FIND [[memory_, adder,
                                         prepared.scratch(worker_idx), held,]]
  REPLACE [[memory_, adder,
                                         prepared.scratch(0), held,]])

ultraep_add_host_mutant(reduction_ends_with_its_workers PROGRAM test_reduction_races
  FILE host/execute.cc
  FIND [[  return drive(finish, prepared, interrupted);]]
  REPLACE [[  return prepared.operation == Operation::kReduce || drive(finish, prepared, interrupted);]])

ultraep_add_host_mutant(reducers_not_awaited PROGRAM test_reduction_races FILE host/execute.cc
  FIND [[(busy = helpers_busy_.load()) != 0;]]
  REPLACE [[prepared.operation != Operation::kReduce && (busy = helpers_busy_.load()) != 0;]])

# ---- banks --------------------------------------------------------------------------------------

ultraep_add_host_mutant(bank_of_another PROGRAM test_banks FILE host/engine.cc
  FIND [[layout_.slots_of(args.bank.index);]]
  REPLACE [[layout_.slots_of(0);]])

ultraep_add_host_mutant(region_of_another PROGRAM test_banks FILE host/engine.cc
  FIND [[    call.addresses.region_offset = region.offset.data();]]
  REPLACE [[    call.addresses.region_offset = layout_.region_offset.data();]])

# ---- wake-ups ------------------------------------------------------------------------------------

ultraep_add_host_mutant(ring_before_store PROGRAM test_doorbell FILE host/policies.hpp
  FIND [[    word(bases_[rank] + offset).store(value, std::memory_order_release);
    if (rank != rank_) Doorbell(bases_[rank] + doorbell_).ring();]]
  REPLACE [[    if (rank != rank_) Doorbell(bases_[rank] + doorbell_).ring();
    word(bases_[rank] + offset).store(value, std::memory_order_release);]])

ultraep_add_host_mutant(sleep_without_last_look PROGRAM test_doorbell FILE host/backoff.hpp
  FIND [[return false;  // the flags are looked at once more before sleeping]]
  REPLACE [[;]])

ultraep_add_host_mutant(ring_moves_nothing PROGRAM test_doorbell FILE host/doorbell.hpp
  FIND [[sequence().fetch_add(1, std::memory_order_seq_cst)]]
  REPLACE [[sequence().fetch_add(0, std::memory_order_seq_cst)]])

ultraep_add_host_mutant(stop_outside_mutex HANGS PROGRAM test_engine_close FILE host/engine.cc
  FIND [[    const std::lock_guard lock(submit_mutex_);  // else the background thread could miss it]]
  REPLACE [[;]])

ultraep_add_mutants(host _ultraep_host_program)
