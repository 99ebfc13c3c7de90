// The threads that run a step together.
//
// On the host and in the simulation one thread runs a step. On a device a warp does: its members
// look at flags and pieces in parallel, where a single thread would pay the memory latency for each
// in turn. All members of a team take the same path through a step, with the same values, except
// inside a loop over `index(), index() + size(), ...`.
//
// A Team provides
//   int32_t index(), size()        this member, and how many there are
//   bool leader()                  true for exactly one member
//   void sync()                    orders what any member did before it ahead of what all do after
//   T broadcast(T value)           the leader's value, for all
//   T read_from(int32_t i, T value)     member i's value, for all
//   uint32_t min_sync(uint32_t value)   the smallest of the members' values, for all
//   uint32_t min_unordered(uint32_t value)  the same, and orders nothing
//   T exclusive_sum(T value)       the sum of the values of the members with a lower index
//   T sum(T value)                 the sum of all members' values, for all; uint32_t or uint64_t
//   MemberCount count(bool value)  how many members it is true of
//   int32_t equal_before(uint32_t value)    how many members with a lower index have this value
// All from sync() on, except min_unordered(), order memory as sync() does. Several members may call
// these concurrently; they order nothing:
//   T atomic_add(T* at, T value)   adds, and returns the previous value. int32_t or int64_t
//   void atomic_min(uint32_t* at, uint32_t value)  stores it if it is less than what is there
//   void set(uint8_t* at)          stores 1
//
// A TeamSet is several teams that work on different questions in parallel: the warps of a block; on
// the host, one thread.
//
// All threads of all teams take the same path through a search, with the same values; only the
// question that each team works on between two exchanges differs. An exchange gives all threads all
// answers.
//
// A TeamSet provides
//   Team                             the type of its teams
//   Team team()                      this thread's team
//   int32_t index(), size()          this team, and how many there are
//   const int32_t* exchange(int32_t value)
//                                    every team's value [size()], for all. What any thread did
//                                    before it happens before what all do after. The array stays
//                                    valid until the exchange after the next
//   void subtract(int32_t* from, int32_t value)
//                                    called by single threads; other threads may do so concurrently
#pragma once

#include "core/base/common.hpp"

namespace uec {

struct MemberCount {
  int32_t before;  // members with a lower index
  int32_t all;
};

// A team of one.
struct SingleThread {
  UEC_HD static constexpr int32_t index() { return 0; }
  UEC_HD static constexpr int32_t size() { return 1; }
  UEC_HD static constexpr bool leader() { return true; }
  UEC_HD static void sync() {}
  template <class T>
  UEC_HD static T broadcast(T value) {
    return value;
  }
  template <class T>
  UEC_HD static T read_from(int32_t, T value) {
    return value;
  }
  UEC_HD static uint32_t min_sync(uint32_t value) { return value; }
  UEC_HD static uint32_t min_unordered(uint32_t value) { return value; }
  template <class T>
  UEC_HD static T exclusive_sum(T) {
    return 0;
  }
  template <class T>
  UEC_HD static T sum(T value) {
    return value;
  }
  UEC_HD static MemberCount count(bool value) { return {0, value}; }
  UEC_HD static int32_t equal_before(uint32_t) { return 0; }
  template <class T>
  UEC_HD static T atomic_add(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
  }
  UEC_HD static void atomic_min(uint32_t* at, uint32_t value) {
    if (value < *at) *at = value;
  }
  UEC_HD static void set(uint8_t* at) { *at = 1; }
};

// A set of one team of one thread.
class SingleTeam {
 public:
  using Team = SingleThread;
  UEC_HD static constexpr Team team() { return {}; }
  UEC_HD static constexpr int32_t index() { return 0; }
  UEC_HD static constexpr int32_t size() { return 1; }
  UEC_HD const int32_t* exchange(int32_t value) {
    value_ = value;
    return &value_;
  }
  UEC_HD static void subtract(int32_t* from, int32_t value) { *from -= value; }

 private:
  int32_t value_ = 0;
};

// The largest of the members' values, for all.
template <class Team>
UEC_HD uint32_t highest(Team team, uint32_t value) {
  return ~team.min_sync(~value);
}
template <class Team>
UEC_HD uint64_t highest(Team team, uint64_t value) {
  const uint32_t upper = highest(team, static_cast<uint32_t>(value >> 32));
  const bool has_it = static_cast<uint32_t>(value >> 32) == upper;
  return uint64_t{upper} << 32 | highest(team, has_it ? static_cast<uint32_t>(value) : 0);
}

// The first of begin .. end - 1 that `is_it`, or `end`.
template <class Team, class Predicate>
UEC_HD int32_t find_first(Team team, int32_t begin, int32_t end, const Predicate& is_it) {
  UEC_ROLLED
  for (int32_t first = begin; first < end; first += team.size()) {
    const int32_t i = first + team.index();
    const auto found = static_cast<int32_t>(team.min_sync(i < end && is_it(i) ? i : end));
    if (found < end) return found;
  }
  return end;
}

// Words that are compared one after the other.
template <int32_t kCount>
struct SortKey {
  uint32_t word[kCount];
};
UEC_HD constexpr uint32_t high_word(int64_t value) {  // of numbers that may be negative
  return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32) ^ (1u << 31);
}
UEC_HD constexpr uint32_t low_word(int64_t value) { return static_cast<uint32_t>(value); }

// Whether this member has the least of all members' words, which differ; `has_any`: it has some.
template <class Team, int32_t kCount>
UEC_HD bool holds_min(Team team, bool has_any, const SortKey<kCount>& own) {
  bool leads = has_any;
  UEC_UNROLLED
  for (const uint32_t word : own.word) leads &= word == team.min_sync(leads ? word : ~0u);
  return leads;
}

// The first of low .. high - 1 that is enough, or `high`. Whatever follows one that is enough must
// be enough too.
template <class Team, class Enough>
UEC_HD int32_t bisect_first(Team team, int32_t low, int32_t high, const Enough& is_enough) {
  while (high - low > 2 * team.size()) {
    const int32_t middle = low + (high - low) / 2;
    if (is_enough(middle))
      high = middle;
    else
      low = middle + 1;
  }
  int32_t i = low + team.index();
  while (i < high && !is_enough(i)) i += team.size();
  return static_cast<int32_t>(team.min_sync(i < high ? i : high));
}

// A member's share of `count` items: a contiguous run, so that sums over earlier members are sums
// over earlier items.
struct Run {
  int32_t begin, end;

  template <class Team>
  UEC_HD static Run of(const Team& team, int32_t count) {
    const auto each = static_cast<int32_t>(ceil_div(count, team.size()));
    const int64_t begin = min64(int64_t{each} * team.index(), count);
    return {static_cast<int32_t>(begin), static_cast<int32_t>(min64(begin + each, count))};
  }
};

// The cells of a table, shared out among the members of a team row by row.
struct Cells {
  int32_t row, column;

  template <class Team>
  UEC_HD Cells(Team team, int32_t num_columns)
      : row(team.index() / num_columns),
        column(team.index() % num_columns),
        rows_(team.size() / num_columns),
        columns_(team.size() % num_columns),
        num_columns_(num_columns) {}

  UEC_HD void next() {
    row += rows_;
    column += columns_;
    if (column < num_columns_) return;
    column -= num_columns_;
    ++row;
  }

 private:
  int32_t rows_, columns_, num_columns_;
};

}  // namespace uec
