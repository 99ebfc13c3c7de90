namespace uec::host {}
