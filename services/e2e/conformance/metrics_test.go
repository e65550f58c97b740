package conformance

func (s *stack) metricsAreAgentENVs() {}
