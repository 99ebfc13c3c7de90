# Mutants: programs that each break one rule, which a test has to catch.
#
#   ultraep_mutate(<family> NAME <name> PROGRAM <program> [WATCHDOG <seconds>]
#                  FILE <path below src/ or tests/> FIND [[...]] REPLACE [[...]])
#
# Replaces the only occurrence of FIND in FILE. Calls with the same NAME form one mutant.
# Text that contains "]]" goes into [=[ ]=].
#
# All mutants of a program are compiled together: mutants.py writes copies of the sources that choose
# one at run time by $UEC_MUTANT; they precede the originals on the include path.
function(ultraep_mutate family)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAME;PROGRAM;WATCHDOG;FILE;FIND;REPLACE" "")
  set(here "ultraep_mutate(${family} NAME ${arg_NAME} FILE ${arg_FILE})")
  if(NOT arg_NAME MATCHES "^[a-z0-9_]+$" OR NOT DEFINED arg_FILE OR NOT DEFINED arg_PROGRAM)
    message(FATAL_ERROR "${here}: needs a NAME of a-z, 0-9 and _, a PROGRAM and a FILE")
  elseif(DEFINED arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${here}: does not know '${arg_UNPARSED_ARGUMENTS}'")
  elseif("${arg_FIND}" STREQUAL "")
    message(FATAL_ERROR "${here}: FIND is empty")
  endif()
  set(key ULTRAEP_MUTANTS_${family})
  get_property(names GLOBAL PROPERTY ${key})
  if(NOT arg_NAME IN_LIST names)
    set_property(GLOBAL APPEND PROPERTY ${key} ${arg_NAME})
    set_property(GLOBAL PROPERTY ${key}_${arg_NAME} ${arg_PROGRAM} ${arg_WATCHDOG})
  endif()
  # The separators of mutants.py.
  string(ASCII 31 field)
  string(ASCII 30 record)
  set_property(GLOBAL APPEND_STRING PROPERTY ${key}_entries
    "${arg_NAME}${field}${arg_FILE}${field}${arg_FIND}${field}${arg_REPLACE}${record}")
  foreach(root IN ITEMS src tests)
    set(original ${PROJECT_SOURCE_DIR}/${root}/${arg_FILE})
    if(EXISTS ${original})
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
    endif()
  endforeach()
endfunction()

# Adds the programs of a family, and a target and a test for each mutant: mutant_<name>. Without a
# sanitizer, which some mutants need, only the copies are made: that finds texts that are gone.
#
# <add_program>(<target> <program> <folder with changed copies>) adds the executable of a program.
# With arguments, such as --mutant, the program is run with them and the mutant's name, reports
# whether it caught the mutant, and needs no sanitizer.
# unmutated_<family>_<program> runs a program without a mutant: nothing must be caught. Under
# ThreadSanitizer it takes the place of the test that the program is of, and `all` builds it.
function(ultraep_add_mutants family add_program)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(key ULTRAEP_MUTANTS_${family})
  set(copies ${CMAKE_BINARY_DIR}/mutants/${family})
  get_property(entries GLOBAL PROPERTY ${key}_entries)
  file(WRITE ${copies}.txt "${entries}")
  set(script ${PROJECT_SOURCE_DIR}/cmake/mutants.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${script})
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${script} ${copies}.txt ${copies}
      ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests
    COMMAND_ERROR_IS_FATAL ANY)

  if(NOT ARGN AND NOT ULTRAEP_SANITIZE)
    return()
  endif()
  get_property(names GLOBAL PROPERTY ${key})
  foreach(name IN LISTS names)
    get_property(run GLOBAL PROPERTY ${key}_${name})
    list(POP_FRONT run program)
    cmake_path(GET program STEM stem)
    set(target mutants_${family}_${stem})
    if(NOT TARGET ${target})
      cmake_language(CALL ${add_program} ${target} ${program} ${copies})
      target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests/mutant.cc)
      set_property(GLOBAL APPEND PROPERTY ULTRAEP_MUTATED ${family}/${program}.cc)
      add_dependencies(mutants ${target})
      if(ARGN)
        add_test(NAME unmutated_${family}_${stem} COMMAND ${target} ${ARGN} none)
        set_tests_properties(unmutated_${family}_${stem}
          PROPERTIES PASS_REGULAR_EXPRESSION "mutant none: survived")
      else()
        add_test(NAME unmutated_${family}_${stem} COMMAND ${target})
      endif()
      set_tests_properties(unmutated_${family}_${stem} PROPERTIES TIMEOUT 300)
      if(ULTRAEP_SANITIZE STREQUAL "thread")
        set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL OFF)
      else()
        set_tests_properties(unmutated_${family}_${stem} PROPERTIES LABELS mutant)
      endif()
    endif()
    add_custom_target(mutant_${name} DEPENDS ${target})
    set(environment UEC_MUTANT=${name})
    if(ARGN)
      add_test(NAME mutant_${name} COMMAND ${target} ${ARGN} ${name})
    else()
      add_test(NAME mutant_${name} COMMAND ${CMAKE_COMMAND} -DNAME=${name}
        -DPROGRAM=$<TARGET_FILE:${target}> -P ${PROJECT_SOURCE_DIR}/tests/run_mutant.cmake)
    endif()
    if(run)
      list(APPEND environment UEC_WATCHDOG_SECONDS=${run})
    endif()
    set_tests_properties(mutant_${name} PROPERTIES
      TIMEOUT 180 LABELS mutant ENVIRONMENT "${environment}")
  endforeach()
endfunction()

# Sets the options that all programs of mutants share.
function(ultraep_compile_mutants target copies std_headers)
  target_include_directories(${target} BEFORE PRIVATE ${copies})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  get_target_property(options ${std_headers} COMPILE_OPTIONS)
  target_compile_options(${target} PRIVATE ${options})
  target_precompile_headers(${target} REUSE_FROM ${std_headers})
endfunction()

# Adds a library that the programs of a family share, of the sources of libraries, changed copies in
# place of originals: ultraep_add_mutated_library(<name> <copies> [<library> <folder>]...)
function(ultraep_add_mutated_library name copies)
  if(NOT TARGET ${name})
    ultraep_library_sources(sources ${ARGN})
    ultraep_changed_sources(sources ${copies} ${PROJECT_SOURCE_DIR}/src ${sources})
    add_library(${name} STATIC EXCLUDE_FROM_ALL ${sources})
    ultraep_compile_mutants(${name} ${copies} mutants_std)
  endif()
endfunction()

# Sets <out> to the sources of a folder, changed copies in place of originals.
function(ultraep_changed_sources out copies folder)
  set(sources "")
  foreach(source IN LISTS ARGN)
    if(EXISTS ${copies}/${source})
      list(APPEND sources ${copies}/${source})
    else()
      list(APPEND sources ${folder}/${source})
    endif()
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# Sets <out> to the sources of libraries, below src/: ultraep_library_sources(<out> [<library> <folder>]...)
function(ultraep_library_sources out)
  set(found "")
  while(ARGN)
    list(POP_FRONT ARGN library folder)
    get_target_property(sources ${library} SOURCES)
    list(TRANSFORM sources PREPEND ${folder}/)
    list(APPEND found ${sources})
  endwhile()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
