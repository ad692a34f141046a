"""SGLang's own serving benchmark on named workloads: what runs, on which servers, and what is shown of it."""
