#include "bind.hpp"

NB_MODULE(_core, m) {
  m.doc() = "The C++ core and the host engine. Use the functions of `ultraep_comm` instead.";
  uec::python::bind_planner(m);
  uec::python::bind_reroute(m);
  uec::python::bind_schedule(m);
  uec::python::bind_memory(m);
  uec::python::bind_engine(m);
}
