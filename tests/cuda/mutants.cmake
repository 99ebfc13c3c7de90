# Rules of the CUDA engine's host half, each broken in a program of its own that must not pass.

# ultraep_add_cuda_mutant(<name> PROGRAM <test> FILE <source below src/> FIND [[...]]
#                         REPLACE [[...]])
#
# PROGRAM is the name of a test in this folder.
function(ultraep_add_cuda_mutant name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PROGRAM;FILE;FIND;REPLACE" "")
  ultraep_mutate(cuda NAME ${name} PROGRAM ${arg_PROGRAM} FILE "${arg_FILE}"
    FIND "${arg_FIND}" REPLACE "${arg_REPLACE}")
endfunction()

function(_ultraep_cuda_program target program copies)
  ultraep_add_mutated_library(mutants_cuda ${copies} ultraep_cuda_host cuda)
  target_link_libraries(mutants_cuda PUBLIC ultraep_host)
  add_executable(${target} EXCLUDE_FROM_ALL cuda/${program}.cc)
  ultraep_compile_mutants(${target} ${copies} mutants_std)
  target_link_libraries(${target} PRIVATE mutants_cuda)
endfunction()

# ---- launches of the local stages ----------------------------------------------------------------

ultraep_add_cuda_mutant(stages_use_memory_at_once PROGRAM test_stages FILE cuda/stages.cc
  FIND [[  if (follows)]]
  REPLACE [[  if (false)]])

ultraep_add_cuda_mutant(stages_captured_wait_for_outside PROGRAM test_stages FILE cuda/stages.cc
  FIND [[capture == 0 ? is_used_ : capture == capture_;]]
  REPLACE [[is_used_;]])

ultraep_add_cuda_mutant(stages_captured_wait_for_any_capture PROGRAM test_stages FILE cuda/stages.cc
  FIND [[capture == 0 ? is_used_ : capture == capture_;]]
  REPLACE [[capture == 0 ? is_used_ : capture_ != 0;]])

ultraep_add_cuda_mutant(stages_captures_share_the_event PROGRAM test_stages FILE cuda/stages.cc
  FIND [[cuEventRecord(capture == 0 ? used_ : captured_, stream)]]
  REPLACE [[cuEventRecord(used_, stream)]])

ultraep_add_cuda_mutant(stages_freed_while_used PROGRAM test_stages FILE cuda/stages.cc
  FIND [[    await_idle([] { return false; });]]
  REPLACE [[]])

ultraep_add_cuda_mutant(stages_shares_of_an_earlier_plan PROGRAM test_stages FILE cuda/stages.cc
  FIND [[  launch(kernels_.shares, first.num_blocks]]
  REPLACE [[  if (!is_used_) launch(kernels_.shares, first.num_blocks]])

ultraep_add_cuda_mutant(stages_fault_read_before_complete PROGRAM test_stages FILE cuda/stages.cc
  FIND [[routing.load(std::memory_order_acquire)]]
  REPLACE [[routing.load(std::memory_order_relaxed)]])

ultraep_add_cuda_mutant(stages_fault_given_up_before_read PROGRAM test_stages FILE cuda/stages.cc
  FIND [[routing.store(0, std::memory_order_release)]]
  REPLACE [[routing.store(0, std::memory_order_relaxed)]])

# ---- launches of calls ---------------------------------------------------------------------------

ultraep_add_cuda_mutant(launcher_counts_blocks_of_transfers_only PROGRAM test_engine
  FILE cuda/launcher.cc
  FIND [[std::min(blocks, fitting(all.reduce))]]
  REPLACE [[blocks]])

ultraep_add_cuda_mutant(launcher_waits_outside_the_capture PROGRAM test_engine_plans
  FILE cuda/launcher.cc
  FIND [[if (capture == 0 || capture != own)]]
  REPLACE [[if (false)]])

ultraep_add_cuda_mutant(launcher_waits_in_a_capture_for_outside PROGRAM test_engine_plans
  FILE cuda/launcher.cc
  FIND [[} else if (capture != 0) {]]
  REPLACE [[} else if (false) {]])

ultraep_add_cuda_mutant(launcher_background_call_with_all_blocks PROGRAM test_engine
  FILE cuda/launcher.cc
  FIND [[background ? background_ : shapes_;]]
  REPLACE [[shapes_;]])

ultraep_add_cuda_mutant(launcher_one_stream_in_and_out_of_captures PROGRAM test_engine_plans
  FILE cuda/launcher.cc
  FIND [[config_.captured_stream]]
  REPLACE [[config_.stream]])

ultraep_add_cuda_mutant(engine_value_wait_without_an_event PROGRAM test_engine_plans
  FILE cuda/engine.cc
  FIND [[  launcher_->order_behind_start(epoch, stream);]]
  REPLACE [[]])

# ---- what slots hold -----------------------------------------------------------------------------

ultraep_add_cuda_mutant(engine_version_not_told PROGRAM test_engine_plans FILE cuda/engine.cc
  FIND [[  set(offsetof(BankTable, segments), 0);]]
  REPLACE [[]])

ultraep_add_cuda_mutant(engine_knows_what_replays_do PROGRAM test_engine_plans
  FILE engine/banks.hpp
  FIND [[      bank.last_captured = call;
      bank.capture = capture;]]
  REPLACE [[      bank.last_captured = call;]])

ultraep_add_cuda_mutant(engine_knows_plans_of_the_device PROGRAM test_engine_plans
  FILE engine/banks.hpp
  FIND [[bank.known && slot_expert != nullptr && capture == 0;]]
  REPLACE [[bank.known && capture == 0;
    if (slot_expert == nullptr) return;]])

ultraep_add_mutants(cuda _ultraep_cuda_program)
