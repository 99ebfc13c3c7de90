# Mutants: copies of a source with one rule broken, which a test has to catch.
#
#   ultraep_mutate(<out_include_dir> NAME <name> FILE <path below src/ or tests/>
#                  FIND [[...]] REPLACE [[...]])
#
# Replaces the one place where FIND stands in FILE, and sets <out_include_dir> to the folder whose
# copies go ahead of the originals on the include path. Calls with the same NAME add up: a later one
# changes what the earlier ones left. The copies are written at the end of the calling directory's
# CMakeLists.txt, and only where they differ from what is there.
#
# Text with "]]" in it goes into [=[ ]=].
function(ultraep_mutate out_include_dir)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAME;FILE;FIND;REPLACE" "")
  set(here "ultraep_mutate(NAME ${arg_NAME} FILE ${arg_FILE})")
  if(NOT arg_NAME MATCHES "^[a-z0-9_]+$" OR NOT DEFINED arg_FILE)
    message(FATAL_ERROR "${here}: needs a NAME of a-z, 0-9 and _, and a FILE")
  elseif(DEFINED arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${here}: does not know '${arg_UNPARSED_ARGUMENTS}'")
  elseif("${arg_FIND}" STREQUAL "" OR "${arg_FIND}" STREQUAL "${arg_REPLACE}")
    message(FATAL_ERROR "${here}: FIND is empty, or is what REPLACE is")
  endif()

  set(key ULTRAEP_MUTANT_${arg_NAME})
  get_property(files GLOBAL PROPERTY ${key})
  if(NOT files)
    # At the end, so that a copy changed by several calls is written, and compiled, once.
    cmake_language(EVAL CODE "cmake_language(DEFER CALL _ultraep_write_mutant ${arg_NAME})")
  endif()
  if(NOT arg_FILE IN_LIST files)
    set(original ${PROJECT_SOURCE_DIR}/src/${arg_FILE})
    if(NOT EXISTS ${original})
      set(original ${PROJECT_SOURCE_DIR}/tests/${arg_FILE})
    endif()
    if(NOT EXISTS ${original})
      message(FATAL_ERROR "${here}: no such file below src/ or tests/")
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
    file(READ ${original} text)
    set_property(GLOBAL APPEND PROPERTY ${key} ${arg_FILE})
  else()
    get_property(text GLOBAL PROPERTY ${key}_${arg_FILE})
  endif()

  string(FIND "${text}" "${arg_FIND}" at)
  string(FIND "${text}" "${arg_FIND}" last REVERSE)
  if(at EQUAL -1)
    message(FATAL_ERROR "${here}: does not contain:\n${arg_FIND}")
  elseif(NOT at EQUAL last)
    message(FATAL_ERROR "${here}: contains more than once:\n${arg_FIND}")
  endif()
  string(REPLACE "${arg_FIND}" "${arg_REPLACE}" text "${text}")
  set_property(GLOBAL PROPERTY ${key}_${arg_FILE} "${text}")
  set(${out_include_dir} ${CMAKE_BINARY_DIR}/mutants/${arg_NAME} PARENT_SCOPE)
endfunction()

function(_ultraep_write_mutant name)
  set(folder ${CMAKE_BINARY_DIR}/mutants/${name})
  get_property(files GLOBAL PROPERTY ULTRAEP_MUTANT_${name})
  # A copy that an earlier configuration left would still be found first.
  file(GLOB_RECURSE stale RELATIVE ${folder} ${folder}/*)
  list(REMOVE_ITEM stale ${files})
  foreach(file IN LISTS stale)
    file(REMOVE ${folder}/${file})
  endforeach()
  foreach(file IN LISTS files)
    get_property(text GLOBAL PROPERTY ULTRAEP_MUTANT_${name}_${file})
    set(before "")
    if(EXISTS ${folder}/${file})
      file(READ ${folder}/${file} before)
    endif()
    if(NOT before STREQUAL text)
      file(WRITE ${folder}/${file} "${text}")
    endif()
  endforeach()
endfunction()
