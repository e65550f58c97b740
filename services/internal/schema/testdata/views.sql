-- A small cell: one node of each standing, sandboxes in each state, one create that was placed and one that
-- was refused. Times are fixed, or half a day off whole days from now.
INSERT INTO nodes (node_id, cluster_id, endpoint, source, lingering, cordoned, cordon_reason, drain_id, version, cpu_config_error)
VALUES ('draining', 'c1', 'http://10.0.0.3:8000', 'kubernetes', false, true, 'new kernel', 1, 'v1.2.0', ''),
       ('ready', 'c1', 'http://10.0.0.1:8000', 'static', false, false, '', NULL, 'v1.2.0', ''),
       ('silent', 'c1', 'http://10.0.0.2:8000', 'static', false, false, '', NULL, 'v1.1.0', 'unexpected end of JSON input'),
       ('lingering', 'c2', 'http://10.0.0.4:8000', 'kubernetes', true, false, '', NULL, '', ''),
       ('left', 'c2', 'http://10.0.0.5:8000', 'registered', false, false, '', NULL, '', ''),
       ('listed', '', 'http://10.0.0.6:8000', 'static', false, false, '', NULL, '', '');
INSERT INTO nodes (node_id, cluster_id, endpoint, source, present, gone_at)
VALUES ('unlisted', 'c1', 'http://10.0.0.7:8000', 'kubernetes', false, '2026-01-01 00:00:00+00'),
       ('never', '', 'http://10.0.0.8:8000', 'kubernetes', false, '2026-01-01 00:00:00+00');
INSERT INTO node_leases (node_id, service_instance_id, place, epoch, expires_at, last_seen_at, ended_at, reported_at_unix_ms, skew_ms,
        facts_digest, roster_digest, reported_status, has_snapshot, cpu_percent, cpu_count, allocated_cpu, memory_used_bytes,
        memory_total_bytes, allocated_memory_bytes, sandbox_count, sandbox_starting_count, paused_sandbox_count)
VALUES ('ready', 'boot-2', '', 2, now() + interval '9.5 days', '2026-01-02 00:00:00+00', NULL, 0, -1500, '', '', 1, true, 40, 8, 3, 4000, 16000, 3000, 2, 1, 1),
       ('silent', 'boot-1', '', 1, now() - interval '2.5 days', '2026-01-01 00:00:00+00', NULL, 0, NULL, '', '', 1, true, 0, 4, 0, 0, 8000, 0, 0, 0, 0),
       ('draining', 'boot-1', '', 1, now() + interval '9.5 days', '2026-01-02 00:00:00+00', NULL, 0, 20, '', '', 1, true, 5, 4, 1, 500, 8000, 500, 1, 0, 0),
       ('lingering', 'boot-1', '', 1, now() + interval '9.5 days', '2026-01-02 00:00:00+00', NULL, 0, 0, '', '', 1, true, 0, 4, 0, 0, 8000, 0, 0, 0, 0),
       ('left', 'boot-1', '', 3, '2026-01-01 00:00:00+00', '2026-01-01 00:00:00+00', '2026-01-01 00:00:00+00', 0, 0, '', '', 1, true, 0, 4, 0, 0, 8000, 0, 0, 0, 0),
       ('unlisted', 'boot-1', '', 1, now() + interval '9.5 days', '2026-01-02 00:00:00+00', NULL, 0, 0, '', '', 1, true, 0, 4, 0, 0, 8000, 0, 0, 0, 0);
INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total, created_at, deadline_at)
VALUES ('draining', 'draining', 'park', 'new kernel', 'operator', false, 1, '2026-01-02 00:00:00+00', now() + interval '1.5 days');
INSERT INTO placements (tenant_id, request_id, fingerprint, outcome, node_id, reservation_id, sandbox_ids, cpu_millis, memory_bytes, strategy, tries,
        reasons, candidates, created_at)
VALUES ('t1', 'r1', '\x01', 'confirmed', 'ready', '018f0000-0000-7000-8000-000000000001', '{box}', 1000, 1024, 'best_of_k', 2,
        '{"unhealthy": 1}', '[{"node": "ready", "verdict": "chosen", "score": 0.25}, {"node": "silent", "verdict": "refused", "reason": "unhealthy"}]',
        '2026-01-02 00:00:01+00'),
       ('t1', 'r2', '\x02', 'reserved', 'ready', '018f0000-0000-7000-8000-000000000002', '{}', 500, 512, 'best_of_k', 1, '{}', '[]', '2026-01-02 00:00:02+00');
INSERT INTO placements (tenant_id, create_key, create_digest, outcome, cpu_millis, memory_bytes, strategy, refusal, reasons, candidates, created_at)
VALUES ('t2', 'k1', '\x03', 'refused', 64000, 1024, 'best_of_k', 'no node has room', '{"declared_cpu": 2, "cordoned": 1, "draining": 30}',
        '[{"node": "silent", "verdict": "refused", "reason": "declared_cpu", "value": 65000, "limit": 4000},
          {"node": "ready", "verdict": "refused", "reason": "declared_cpu", "value": 67000, "limit": 8000},
          {"node": "draining", "verdict": "refused", "reason": "cordoned"}]', '2026-01-02 00:00:03+00');
INSERT INTO bindings (sandbox_id, state, node_id, cluster_id, revision, incarnation, origin, tenant_id, cpu_millis, memory_bytes, placement_id, bound_at, ended_at, ended_by)
VALUES ('box', 'bound', 'ready', 'c1', 100, 1, 'recorded', 't1', 1000, 1024, 1, '2026-01-02 00:00:05+00', NULL, NULL),
       ('forked', 'bound', 'ready', 'c1', 101, 1, 'event', '', 1000, 1024, NULL, '2026-01-02 00:00:06+00', NULL, NULL),
       ('waiting', 'parked', 'left', 'c2', 102, 2, 'adopted', 't1', 0, 0, NULL, '2026-01-01 00:00:00+00', '2026-01-01 12:00:00+00', 'unregistered'),
       ('ended', 'gone', 'draining', 'c1', 103, 1, 'recorded', 't2', 1000, 1024, NULL, '2026-01-01 00:00:00+00', '2026-01-02 00:00:07+00', 'deleted');
INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, cpu_millis, memory_bytes, named, sandbox_id, expires_at)
VALUES ('018f0000-0000-7000-8000-000000000002', 1, 2, 'ready', 't1', 500, 512, true, NULL, now() + interval '1 day'),
       ('018f0000-0000-7000-8000-000000000003', 1, NULL, 'ready', '', 1000, 1024, true, 'forked', NULL);
INSERT INTO orphans (node_id, sandbox_id, reason, holder_node_id)
VALUES ('silent', 'box', 'held_elsewhere', 'ready'), ('silent', 'ended', 'deleted', NULL);
INSERT INTO sandbox_events (at, source, kind, effect, cluster_id, node_id, service_instance_id, sandbox_id, cpu_millis, memory_bytes, disk_bytes, detail)
VALUES ('2026-01-02 00:00:04+00', 'node', 'create', 'bound', 'c1', 'ready', 'boot-2', 'box', 1000, 1024, 0, NULL),
       ('2026-01-02 00:00:06+00', 'node', 'fork', 'bound', 'c1', 'ready', 'boot-2', 'forked', 1000, 1024, 0, '{"seq": 2, "incarnation": 0}'),
       ('2026-01-02 00:00:08+00', 'node', 'pause', 'noted', 'c1', 'ready', 'boot-2', 'box', 1000, 1024, 0, NULL),
       ('2026-01-02 00:00:08+00', 'scheduler', 'orphan', 'held_elsewhere', 'c1', 'silent', '', 'box', NULL, NULL, NULL, '{"holder_node_id": "ready"}'),
       ('2026-01-01 12:00:00+00', 'scheduler', 'parked', 'unregistered', 'c2', 'left', '', 'waiting', NULL, NULL, NULL, NULL),
       ('2026-01-02 00:00:07+00', 'scheduler', 'gone', 'deleted', 'c1', 'draining', '', 'ended', NULL, NULL, NULL, NULL),
       ('2026-01-02 00:00:09+00', 'scheduler', 'node_unhealthy', '', 'c1', 'silent', '', '', NULL, NULL, NULL, NULL);
INSERT INTO placements (tenant_id, request_id, fingerprint, outcome, cpu_millis, memory_bytes, strategy, refusal, reasons, candidates, created_at)
VALUES ('t2', 'r4', '\x04', 'refused', 1000, 1024, 'best_of_k', 'quota', '{}', '[{"node": "", "verdict": "refused", "reason": "quota_sandboxes", "value": 1}]', '2026-01-02 00:00:10+00'),
       ('t2', 'r5', '\x05', 'refused', 1000, 1024, 'best_of_k', 'no_ready_node', '{}', '[]', '2026-01-02 00:00:11+00');
