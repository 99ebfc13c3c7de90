// The digest depends on every bit that goes in, and is the same in every build.
#include <set>
#include <utility>
#include <vector>

#include "core/base/digest.hpp"
#include "core/transfer/protocol.hpp"
#include "support/check.hpp"

namespace {

uint64_t digest(const std::vector<int32_t>& values) {
  return uec::digest_ints(uec::SingleThread{}, 0, values.data(),
                          static_cast<int64_t>(values.size()));
}

}  // namespace

int main() {
  // The part of a digest that peers see: the 30 bits in its record.
  const auto shown = [](uint64_t d) {
    return uec::CallRecord::make(1, d, uec::RecordKind::kCall).word;
  };
  std::set<uint64_t> seen;
  for (uint64_t past = 1; past <= 4; ++past) {
    const uint64_t state = uec::mix(0, past);
    CHECK(seen.insert(shown(uec::mix(state, 0))).second);
    for (int bit = 0; bit < 64; ++bit)
      CHECK(seen.insert(shown(uec::mix(state, uint64_t{1} << bit))).second);
  }
  // Length and order count; -1 is not 0; odd and even lengths.
  seen.clear();
  for (const auto& values : std::vector<std::vector<int32_t>>{{},
                                                              {0},
                                                              {0, 0},
                                                              {0, 0, 0},
                                                              {-1},
                                                              {-1, -1},
                                                              {1, 2},
                                                              {2, 1},
                                                              {1, 2, 3},
                                                              {1, 3, 2},
                                                              {1, 2, 3, 0}})
    CHECK(seen.insert(shown(digest(values))).second);
  for (int i = 0; i < 65; ++i) {  // one slot of a plan moves
    std::vector<int32_t> plan(65, -1);
    plan[i] = 7;
    CHECK(seen.insert(shown(digest(plan))).second);
  }
  seen.clear();
  for (int i = 0; i < 64; ++i) {  // two words change places, also where all others are equal
    std::vector<int32_t> values(64, 5);
    values[i] = 6;
    values[(i + 2) % 64] = 7;
    CHECK(seen.insert(shown(digest(values))).second);
    std::swap(values[i], values[(i + 2) % 64]);
    CHECK(seen.insert(shown(digest(values))).second);
  }
  seen.clear();
  for (int i = 0; i < 65; ++i)  // any two values change places, whichever they are
    for (int j = 0; j < i; ++j) {
      std::vector<int32_t> values(65);
      for (int k = 0; k < 65; ++k) values[k] = k * k - 7;
      std::swap(values[i], values[j]);
      CHECK(seen.insert(digest(values)).second);
    }
  seen.clear();
  for (int32_t all = 0; all < 64; ++all)  // equal words do not cancel
    CHECK(seen.insert(shown(digest(std::vector<int32_t>(32, all + 10)))).second);
  // Chained: the same call after a different history has a different digest.
  CHECK(uec::mix(uec::mix(0, 1), 2) != uec::mix(uec::mix(0, 2), 2));
  // Ranks with differently built libraries have to agree.
  CHECK(uec::mix(0, 1) == 0x17FB89EE35ED72B0ull);
  CHECK(digest({3, 1, 4, 1, 5}) == 0x543818B38E806F00ull);
  std::vector<int32_t> long_one;
  for (int i = 0; i < 19; ++i) long_one.push_back(i * i - 7);
  CHECK(digest(long_one) == 0x5805907940A61867ull);
}
