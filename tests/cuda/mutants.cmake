# Rules of the CUDA engine's host half, each broken in a program of its own that must not pass.

# ultraep_add_cuda_mutant(<name> [HANGS] PROGRAM <test> FILE <source below src/> FIND [[...]]
#                         REPLACE [[...]])
#
# PROGRAM is the name of a test in this folder.
function(ultraep_add_cuda_mutant name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HANGS" "PROGRAM;FILE;FIND;REPLACE" "")
  ultraep_mutate(overlay NAME ${name} FILE "${arg_FILE}" FIND "${arg_FIND}"
    REPLACE "${arg_REPLACE}")
  set(target mutant_${name})
  # The library's own object of this source stays in the library: nothing asks for it.
  add_executable(${target} EXCLUDE_FROM_ALL cuda/${arg_PROGRAM}.cc ${overlay}/${arg_FILE})
  set_source_files_properties(${overlay}/${arg_FILE} PROPERTIES GENERATED ON)
  target_include_directories(${target} BEFORE PRIVATE ${overlay})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE ultraep_cuda_host)
  target_compile_options(${target} PRIVATE ${mutant_options})
  target_precompile_headers(${target} REUSE_FROM mutants_std)
  if(arg_HANGS)
    target_compile_definitions(${target} PRIVATE UEC_WATCHDOG_SECONDS=10)
  endif()
  add_test(NAME ${target} COMMAND ${CMAKE_COMMAND} -DNAME=${name} -DPROGRAM=$<TARGET_FILE:${target}>
    -P ${CMAKE_CURRENT_SOURCE_DIR}/run_mutant.cmake)
  set_tests_properties(${target} PROPERTIES TIMEOUT 180 LABELS mutant)
  add_dependencies(mutants ${target})
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

ultraep_add_cuda_mutant(launcher_waits_outside_the_capture PROGRAM test_engine_plans
  FILE cuda/launcher.cc
  FIND [[if (capture == 0 || capture != own)]]
  REPLACE [[if (false)]])

ultraep_add_cuda_mutant(launcher_waits_in_a_capture_for_outside PROGRAM test_engine_plans
  FILE cuda/launcher.cc
  FIND [[} else if (capture != 0) {]]
  REPLACE [[} else if (false) {]])

ultraep_add_cuda_mutant(launcher_one_stream_in_and_out_of_captures PROGRAM test_engine_plans
  FILE cuda/launcher.cc
  FIND [[config_.captured_stream]]
  REPLACE [[config_.stream]])
