"""The protocol, the runner, the sampler, the step loop and the supervised engine process."""
