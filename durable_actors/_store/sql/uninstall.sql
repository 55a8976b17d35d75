-- uninstall: drop every object of ours, with its data. Several statements: one simple query, one transaction.
-- params   none
-- returns  nothing
-- locks    ACCESS EXCLUSIVE on the tables: waits for running transactions
drop table if exists durable.signals;
drop table if exists durable.nodes;
drop table if exists durable.gen_durable;
drop table if exists durable.migrations;
drop type if exists durable.durable_status;
