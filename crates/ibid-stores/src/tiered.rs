//! Two stores as one: PostgreSQL decides, Redis speeds it up or stands in.
