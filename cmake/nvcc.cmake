# Runs nvcc and keeps its resource report for every kernel:
#
#   cmake -DREPORT=<file> [-DBEFORE=<report>] -P nvcc.cmake -- <nvcc> <arguments...>
#
# BEFORE: a report to append to.
# The report is a build output: tests hold registers, stack and spills to a budget.
set(command "")
math(EXPR last "${CMAKE_ARGC} - 1")
set(past_separator OFF)
foreach(index RANGE ${last})
  if(past_separator)
    list(APPEND command "${CMAKE_ARGV${index}}")
  elseif(CMAKE_ARGV${index} STREQUAL "--")
    set(past_separator ON)
  endif()
endforeach()
execute_process(COMMAND ${command} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
set(before "")
if(DEFINED BEFORE)
  file(READ ${BEFORE} before)
endif()
file(WRITE ${REPORT} "${before}${text}")
if(NOT result EQUAL 0)
  message(NOTICE "${text}")  # FATAL_ERROR would wrap the lines
  message(FATAL_ERROR "nvcc failed: ${result}")
endif()
# Only warnings go to the build log; the rest is for the tests.
string(REGEX MATCHALL "[^\n]*[Ww]arning[^\n]*" warnings "${text}")
foreach(warning IN LISTS warnings)
  message(NOTICE "${warning}")
endforeach()
