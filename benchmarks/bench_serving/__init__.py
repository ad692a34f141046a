"""SGLang's own serving benchmark on named workloads: the loads, the servers, and the tables of results."""
