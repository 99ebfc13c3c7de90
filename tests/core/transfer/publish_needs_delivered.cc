// Compiled, never linked. As it stands it builds; each UEC_BROKEN below must not, because a flag
// would be published without proof that what it vouches for has been delivered.
#include <atomic>

#include "host/policies.hpp"

void publish(uec::host::HostMemory& memory, uec::host::HostMover& mover, int32_t* arrived) {
#if UEC_BROKEN == 1  // no token
  memory.publish(1, 128, 7);
#elif UEC_BROKEN == 2  // a token made on the spot
  memory.publish(uec::Delivered{}, 1, 128, 7);
#elif UEC_BROKEN == 3
  memory.publish({}, 1, 128, 7);
#elif UEC_BROKEN == 4  // only a Mover may ask for one
  memory.publish(uec::DeliveryPolicy::delivered(), 1, 128, 7);
#elif UEC_BROKEN == 5  // arriving at a counter vouches as well
  memory.arrive(arrived, 1);
#endif
  const auto ticket = mover.commit_and_wait_source(0);
  mover.wait_delivered(ticket, true, [&](uec::Delivered token) {
    memory.publish(token, 1, 128, 7);
    memory.arrive(token, arrived, 1);
  });
}
