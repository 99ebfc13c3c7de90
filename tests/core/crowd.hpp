// A team of several members, as core/base/team.hpp describes it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/base/team.hpp"
#include "support/check.hpp"
#include "support/fibers.hpp"

// Where the members of one team synchronise. Each operation is one meeting: members leave a value
// each, and may read those of all others until the meeting after the next.
class Room {
 public:
  explicit Room(int32_t num_members)
      : size(num_members), all_here_(num_members), seats_{Seats(num_members), Seats(num_members)} {}

  const int32_t size;

 private:
  friend class Crowd;

  struct Seat {
    int32_t operation;
    std::array<std::byte, 48> value;
  };
  using Seats = std::vector<Seat>;

  FiberBarrier all_here_;
  Seats seats_[2];
};

class Crowd {
 public:
  static int32_t index() { return me().index; }
  static int32_t size() { return me().room->size; }
  static bool leader() { return index() == size() - 1; }  // not the first, to be found out
  static void sync() { meet(kSync, 0); }
  template <class T>
  static T broadcast(T value) {
    return read<T>(meet(kShare, value)[size() - 1]);
  }
  template <class T>
  static T read_from(int32_t index, T value) {
    CHECK(index >= 0 && index < size());
    return read<T>(meet(kFrom + index, value)[index]);
  }
  static uint32_t min_sync(uint32_t value) {
    for (const Room::Seat& seat : meet(kLowest, value))
      if (read<uint32_t>(seat) < value) value = read<uint32_t>(seat);
    return value;
  }
  static uint32_t min_unordered(uint32_t value) { return min_sync(value); }
  template <class T>
  static T exclusive_sum(T value) {
    const Room::Seats& seats = meet(kSumBefore, value);
    T sum = 0;
    for (int32_t i = 0; i < index(); ++i) sum += read<T>(seats[i]);
    return sum;
  }
  template <class T>
  static T sum(T value) {
    static_assert(std::is_same_v<T, uint32_t> || std::is_same_v<T, uint64_t>);
    T sum = 0;
    for (const Room::Seat& seat : meet(kSum, value)) sum += read<T>(seat);
    return sum;
  }
  static uec::MemberCount count(bool value) {
    const Room::Seats& seats = meet(kCount, value);
    uec::MemberCount counted{0, 0};
    for (int32_t i = 0; i < size(); ++i) {
      counted.all += read<bool>(seats[i]);
      if (i < index()) counted.before += read<bool>(seats[i]);
    }
    return counted;
  }
  static int32_t equal_before(uint32_t value) {
    const Room::Seats& seats = meet(kEqualBefore, value);
    int32_t count = 0;
    for (int32_t i = 0; i < index(); ++i) count += read<uint32_t>(seats[i]) == value;
    return count;
  }
  template <class T>
  static T atomic_add(T* at, T value) {
    return std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed);
  }
  static void atomic_min(uint32_t* at, uint32_t value) {
    std::atomic_ref least(*at);
    uint32_t now = least.load(std::memory_order_relaxed);
    while (value < now && !least.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
    }
  }
  static void set(uint8_t* at) { std::atomic_ref(*at).store(1, std::memory_order_relaxed); }

  // Checks that all members have this value.
  static void agree(uint64_t value) {
    for (const Room::Seat& seat : meet(kAgree, value)) CHECK(read<uint64_t>(seat) == value);
  }

  // Runs body() as every member of a team, and returns what each has returned.
  template <class Body>
  static auto run(int32_t size, Body&& body) {
    Room room(size);
    std::vector<decltype(body())> results(size);
    Fibers members;
    for (int32_t i = 0; i < size; ++i)
      members.spawn([&room, &body, &results, i] {
        Member member{&room, i, 0};
        Fiber::running()->set_own(&member);
        results[i] = body();
      });
    members.wait();
    return results;
  }

 private:
  enum Operation : int32_t {
    kSync,
    kShare,
    kLowest,
    kSumBefore,
    kSum,
    kCount,
    kEqualBefore,
    kAgree,
    kFrom  // + index
  };

  template <class T>
  static T read(const Room::Seat& seat) {
    T value;
    std::memcpy(&value, seat.value.data(), sizeof value);
    return value;
  }

  template <class T>
  static const Room::Seats& meet(int32_t operation, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(Room::Seat::value));
    Member& member = me();
    Room::Seats& seats = member.room->seats_[member.turn++ % 2];
    seats[member.index].operation = operation;
    std::memcpy(seats[member.index].value.data(), &value, sizeof value);
    member.room->all_here_.wait();
    // All members take the same path: otherwise a warp on a device would hang or mix up values.
    for (const Room::Seat& seat : seats) CHECK_EQ(seat.operation, operation);
    return seats;
  }

  struct Member {
    Room* room;
    int32_t index;
    uint32_t turn;
  };
  static Member& me() { return *static_cast<Member*>(Fiber::running()->own()); }
};
