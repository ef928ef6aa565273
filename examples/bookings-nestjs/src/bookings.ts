import { BadRequestException, Body, Controller, Delete, Get, HttpCode, NotFoundException, Param, Post } from '@nestjs/common'
import pg from 'pg'

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL })

const SCHEMA = `
  CREATE TABLE IF NOT EXISTS bookings (
    id serial PRIMARY KEY,
    hold text NOT NULL,
    status text NOT NULL DEFAULT 'pending'
  )`

export const prepareDatabase = () => pool.query(SCHEMA)

/** Nothing here knows about idempotency: the interceptor in main.ts does. */
@Controller('bookings')
export class BookingsController {
  @Post()
  async create(@Body() body: { holdId?: string }) {
    if (!body?.holdId) throw new BadRequestException('holdId: expected the id of a hold')
    const { rows } = await pool.query('INSERT INTO bookings (hold) VALUES ($1) RETURNING id, hold, status', [body.holdId])
    return rows[0]
  }

  @Post(':id/confirm')
  @HttpCode(200)
  confirm(@Param('id') id: string) {
    return this.change(id, 'pending', 'confirmed')
  }

  @Delete(':id')
  cancel(@Param('id') id: string) {
    return this.change(id, 'confirmed', 'cancelled')
  }

  @Get()
  async count() {
    const { rows } = await pool.query('SELECT count(*)::int AS bookings FROM bookings')
    return rows[0]
  }

  private async change(id: string, from: string, to: string) {
    const update = 'UPDATE bookings SET status = $3 WHERE id = $1 AND status = $2 RETURNING id, hold, status'
    const { rows } = await pool.query(update, [Number(id), from, to])
    if (rows.length === 0) throw new NotFoundException(`there is no ${from} booking ${id}`)
    return rows[0]
  }
}
