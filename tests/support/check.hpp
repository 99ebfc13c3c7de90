// A check that reports its place and values. Tests are plain programs: exit code 0 is success.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)

#define CHECK_EQ(a, b)                                                                           \
  do {                                                                                           \
    const long long left_ = static_cast<long long>(a), right_ = static_cast<long long>(b);       \
    if (left_ != right_) {                                                                       \
      std::fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #a, left_, #b, \
                   right_);                                                                      \
      std::exit(1);                                                                              \
    }                                                                                            \
  } while (0)
