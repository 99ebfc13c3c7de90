#include "bind.hpp"

NB_MODULE(_core, m) {
  m.doc() = "The C++ core and the engines. Use the functions of `ultraep_comm` instead.";
  uec::python::bind_enums(m);
  uec::python::bind_planner(m);
  uec::python::bind_reroute(m);
  uec::python::bind_schedule(m);
  uec::python::bind_model(m);
  uec::python::bind_memory(m);
  uec::python::bind_health(m);
  uec::python::bind_engine(m);
  uec::python::bind_c10d(m);
  uec::python::bind_cuda(m);
  uec::python::bind_cuda_stages(m);
  uec::python::bind_ending(m);
}
