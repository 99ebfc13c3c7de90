# Runs a mutant: cmake -DNAME=<name> -DPROGRAM=<path> -P run_mutant.cmake
#
# Passes if a test or a sanitizer has caught it. A program that ends in any other way, such as a
# sanitizer that does not start, proves nothing and fails.
set(ENV{TSAN_OPTIONS} "halt_on_error=1:atexit_sleep_ms=0")
execute_process(COMMAND ${PROGRAM} TIMEOUT 150
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)

if(result EQUAL 0)
  message("mutant ${NAME}: survived")
  message(FATAL_ERROR "every check passed")
elseif(output MATCHES "watchdog: ([^\n]*)")
  set(by "a hang, ${CMAKE_MATCH_1}")
elseif(output MATCHES "emulated device: ([^\n]*)")
  set(by "the emulated device: ${CMAKE_MATCH_1}")
elseif(output MATCHES "WARNING: ThreadSanitizer: ([a-z -]*[a-z])")
  set(by "ThreadSanitizer, ${CMAKE_MATCH_1}")
elseif(output MATCHES "#[0-9]+ [^\n]*uec::" AND output MATCHES "ERROR: ThreadSanitizer: ([A-Z]+) on ")
  set(by "ThreadSanitizer, ${CMAKE_MATCH_1} in the code under test")
elseif(output MATCHES "([a-z_]+\\.(cc|hpp):[0-9]+): ")
  set(by "the check at ${CMAKE_MATCH_1}")
else()
  message(FATAL_ERROR "mutant ${NAME} ended with ${result}, caught by no check:\n${output}")
endif()
message("mutant ${NAME}: caught (by ${by})")
