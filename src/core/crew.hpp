// Teams that answer questions side by side: the warps of a block; on the host, one thread.
//
// All threads of all teams go through a search in the same way, with the same values; what differs
// is the question that a team asks itself between two exchanges. Then everyone knows all answers.
//
// A Crew provides
//   Team                             what each of its teams is (team.hpp)
//   Team team()                      the one of this thread
//   int32_t index(), size()          this team, and how many there are
//   const int32_t* exchange(int32_t value)
//                                    every team's value [size()], for all. What any thread did
//                                    before comes before what all do after. Stays as it is until
//                                    the exchange after the next
//   void subtract(int32_t* from, int32_t value)
//                                    by this thread alone, whoever else subtracts
#pragma once

#include "core/team.hpp"

namespace uec {

// A crew of one team of one.
class AloneCrew {
 public:
  using Team = Alone;
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

}  // namespace uec
