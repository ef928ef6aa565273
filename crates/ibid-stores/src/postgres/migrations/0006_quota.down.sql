DROP TABLE ibid.quota;
