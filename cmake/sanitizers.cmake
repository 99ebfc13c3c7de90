# One switch for the whole build, so that no target is left uninstrumented.
# -g1 -Og give the names and lines that reports need; more of either doubles the compile time.
if(ULTRAEP_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -g1 -Og)
  add_link_options(-fsanitize=thread)
elseif(ULTRAEP_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -Og)
  add_link_options(-fsanitize=address,undefined)
elseif(ULTRAEP_SANITIZE STREQUAL "fuzzer")
  # clang's libFuzzer, linked by targets in tests/fuzz; all code is instrumented for coverage.
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
    -fno-omit-frame-pointer -g1 -O1)
  add_link_options(-fsanitize=address,undefined)
elseif(NOT ULTRAEP_SANITIZE STREQUAL "")
  message(FATAL_ERROR
    "ULTRAEP_SANITIZE is '${ULTRAEP_SANITIZE}'; expected empty, 'thread', 'address' or 'fuzzer'")
endif()
