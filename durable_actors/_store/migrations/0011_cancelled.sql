-- The third way to end. In a migration of its own: a new value can be used only after its transaction has been committed.

alter type durable.durable_status add value if not exists 'cancelled';
